#!/bin/sh
# Has Redis take up what was renewed in its Secrets: passwords, certificates. Nothing restarts. The kubelet runs it before each
# liveness probe, so this happens within 10 s of the change of the mounted files; `kubectl exec` runs it at once, and shows what
# fails. What fails is tried again the next time.
set -eu
umask 027
cd /run/redis

tls=
[ ! -f /etc/redis/tls.inc ] || tls='--tls --insecure' # component redis-tls; to itself, whose certificate may just be changing

# The user `reload` has a password of this pod alone, made with the users.
ask() {
  said=$(REDISCLI_AUTH=$(cat reload) timeout 3 redis-cli -h "$POD_IP" $tls --user reload --no-auth-warning "$@") || true
  [ "$said" = OK ] && return
  echo "reload.sh: $1 $2: ${said:-no answer}" >&2
  return 1
}

# The file of users with the passwords that the Secrets have now. A file is named after a user and has a password a line.
users() {
  edits=
  for file in /etc/redis-passwords/*/*; do
    user=$(basename "$file" | sed 's/\./\\./g')
    hashes=$(tr -d '\r' < "$file" | grep . | while IFS= read -r password; do
      printf ' #%s' "$(printf %s "$password" | sha256sum | cut -c -64)"
    done)
    [ -z "$hashes" ] || edits="$edits;s/^user $user on\( #[0-9a-f]*\)*/user $user on$hashes/"
  done
  sed "$edits" users.acl
}

now=$(cat /etc/redis-passwords/*/* /etc/redis-tls/* 2>/dev/null | sha256sum)
[ ! -f loaded ] || [ "$now" != "$(cat loaded)" ] || exit 0

users > "users.acl.$$"
if cmp -s "users.acl.$$" users.acl; then
  rm "users.acl.$$"
else
  cp users.acl users.acl.before
  mv "users.acl.$$" users.acl
  ask acl load || { mv users.acl.before users.acl; exit 1; }
  rm -f users.acl.before
  echo 'reload.sh: passwords loaded'
fi
# What a replica logs in with, the next time that it does.
[ ! -f /etc/redis-passwords/roles/replica ] || ask config set masterauth "$(head -n 1 /etc/redis-passwords/roles/replica | tr -d '\r')"
if [ -n "$tls" ]; then
  ask config set tls-cert-file /etc/redis-tls/tls.crt tls-key-file /etc/redis-tls/tls.key tls-ca-cert-file /etc/redis-tls/ca.crt
  echo 'reload.sh: certificate loaded'
fi
echo "$now" > loaded
