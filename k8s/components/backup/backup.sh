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

frozen() { # the values of frozen parameters: written before the first segment, and never deleted
  ls "$1" 2>/dev/null | grep '\.unshared$' || true
}

alone() { # alone FILE: waits until no other job has this lock
  exec 9> "$1"
  flock -n 9 || { echo 'backup: another one is running: waiting'; flock 9; }
}

case $1 in
  backup)
    alone "$BACKUPS/.lock"
    [ -n "$(segments "$JOURNAL")" ] || fail "there is no journal in $JOURNAL; the copies stay as they are"
    last=$BACKUPS/$(copies | tail -n 1)
    copy=$BACKUPS/unfinished
    rm -rf "$copy"
    mkdir "$copy"
    # The updater deletes the oldest first: in this order nothing can be missing between two segments.
    for name in $(frozen "$JOURNAL") $(segments "$JOURNAL"); do
      if cmp -s "$JOURNAL/$name" "$last/$name" && ln "$last/$name" "$copy/$name"; then
        continue # copies share segments that are complete, where the volume has hard links
      fi
      rm -f "$copy/$name" # NFS may have linked it all the same: cp would write into the other copy
      if ! cp -p "$JOURNAL/$name" "$copy/$name"; then
        [ ! -e "$JOURNAL/$name" ] || fail "$name could not be copied"
        rm -f "$copy/$name"
        break
      fi
    done
    fedstream journal verify "$copy"
    sync -f "$copy"
    while made=$(date -u +%Y%m%dT%H%M%SZ) && [ -e "$BACKUPS/$made" ]; do sleep 1; done
    mv "$copy" "$BACKUPS/$made"
    copies | head -n -"$KEEP" | while read -r old; do
      mv "$BACKUPS/$old" "$copy" # what is half deleted must not look like a copy
      rm -rf "$copy"
    done
    echo "backup: $made is complete; there are $(copies | wc -l) copies"
    ;;
  restore)
    alone "$JOURNAL.lock"
    chosen=${BACKUP:-$(copies | tail -n 1)}
    [ -n "$chosen" ] || fail "there is no copy in $BACKUPS"
    [ -d "$BACKUPS/$chosen" ] || fail "there is no copy $chosen in $BACKUPS; there are: $(copies | tr '\n' ' ')"
    [ ! -e "$JOURNAL.before" ] || [ -z "$(segments "$JOURNAL")" ] ||
      fail "$JOURNAL.before is there from an earlier restore: delete it, or move it away"
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
    mv -T "$new" "$JOURNAL" || fail "an updater has begun a journal: scale it to 0, and restore again"
    echo "backup: $JOURNAL is now the copy $chosen"
    ;;
  *) fail "backup or restore, not '$1'" ;;
esac
