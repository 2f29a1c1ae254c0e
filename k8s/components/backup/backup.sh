#!/bin/sh
# Copies the journal, or puts a copy back.
#   backup   adds a verified copy to $BACKUPS, named by its time, and keeps the newest $KEEP
#   restore  makes the newest copy, or $BACKUP, the journal; what was there becomes $JOURNAL.before
set -eu

fail() {
  echo "backup: $*" >&2
  exit 1
}

copies() {
  ls "$BACKUPS" | grep -xE '[0-9]{8}T[0-9]{6}Z' || true
}

segments() { # the newest first
  ls -r "$1" 2>/dev/null | grep '\.journal$' || true
}

case $1 in
  backup)
    [ -n "$(segments "$JOURNAL")" ] || fail "there is no journal in $JOURNAL; the copies stay as they are"
    last=$BACKUPS/$(copies | tail -n 1)
    copy=$BACKUPS/unfinished
    rm -rf "$copy"
    mkdir "$copy"
    # The updater deletes the oldest first: in this order nothing can be missing between two segments.
    for name in $(segments "$JOURNAL"); do
      if cmp -s "$JOURNAL/$name" "$last/$name"; then
        ln "$last/$name" "$copy/$name" # copies share segments that are complete
      elif ! cp -p "$JOURNAL/$name" "$copy/$name"; then
        [ ! -e "$JOURNAL/$name" ] || fail "$name could not be copied"
        rm -f "$copy/$name"
        break
      fi
    done
    fedstream journal verify "$copy"
    sync -f "$copy"
    made=$(date -u +%Y%m%dT%H%M%SZ)
    mv "$copy" "$BACKUPS/$made"
    copies | head -n -"$KEEP" | while read -r old; do rm -rf "${BACKUPS:?}/$old"; done
    echo "backup: $made is complete; there are $(copies | wc -l) copies"
    ;;
  restore)
    chosen=${BACKUP:-$(copies | tail -n 1)}
    [ -n "$chosen" ] || fail "there is no copy in $BACKUPS"
    [ -d "$BACKUPS/$chosen" ] || fail "there is no copy $chosen in $BACKUPS; there are: $(copies | tr '\n' ' ')"
    [ ! -e "$JOURNAL.before" ] || fail "$JOURNAL.before is there from an earlier restore: delete it, or move it away"
    new=$JOURNAL.unfinished
    rm -rf "$new"
    cp -r "$BACKUPS/$chosen" "$new"
    fedstream journal verify "$new"
    sync -f "$new"
    if [ -n "$(segments "$JOURNAL")" ]; then
      mv "$JOURNAL" "$JOURNAL.before"
    else
      rm -rf "$JOURNAL" # at most an updater's claim
    fi
    mv "$new" "$JOURNAL"
    echo "backup: $JOURNAL is now the copy $chosen"
    ;;
  *) fail "backup or restore, not '$1'" ;;
esac
