#!/bin/sh
# Has Redis take up what was renewed in its Secrets: passwords, certificates. Nothing restarts. The kubelet runs it before each
# liveness probe, so this happens within 10 s of the change of the mounted files; `kubectl exec` runs it at once, and shows what
# fails. What fails is tried again the next time.
set -eu
umask 027
cd /run/redis
exec 9>reload.lock # an older process would write older passwords over newer ones
flock -w 2 9 || { echo 'reload.sh: another one is running' >&2; exit 1; }

tls=
[ ! -f /etc/redis/tls.inc ] || tls='--tls --insecure' # component redis-tls; to itself, whose certificate may just be changing

# ask COMMAND...: as the user `reload`, whose password is of this pod alone, made with the users. No password may be among the
# arguments, which others can see in /proc.
ask() {
  said=$(REDISCLI_AUTH=$(cat reload) timeout 3 redis-cli -h "$POD_IP" $tls --user reload --no-auth-warning "$@" 9>&-) || true
  [ "$said" = OK ] && return
  [ "$1" != -x ] || shift
  echo "reload.sh: $1 $2: ${said:-no answer}" >&2
  return 1
}

# The file of users with the passwords that the Secrets have now. A file is named after a user and has a password a line.
users() {
  for file in /etc/redis-passwords/*/*; do
    user=$(basename "$file" | sed 's/\./\\./g')
    hashes=$(tr -d '\r' < "$file" | grep . | while IFS= read -r password; do
      printf ' #%s' "$(printf %s "$password" | sha256sum | cut -c -64)"
    done)
    [ -z "$hashes" ] || printf '%s\n' "s/^user $user on\( #[0-9a-f]*\)*/user $user on$hashes/"
  done | sed -f /dev/stdin users.acl
}

now=$(cat /etc/redis-passwords/*/* /etc/redis-tls/* 2>/dev/null | sha256sum)
[ ! -f loaded ] || [ "$now" != "$(cat loaded)" ] || exit 0
rm -f loaded

[ -f users.loaded ] || cp users.acl users.loaded # Redis read it when it started
users > users.new
mv users.new users.acl
if ! cmp -s users.acl users.loaded; then # loading closes connections
  ask acl load
  cp users.acl users.loaded
  echo 'reload.sh: passwords loaded'
fi
# What a replica logs in with, the next time that it does.
replica=/etc/redis-passwords/roles/replica
[ ! -f $replica ] || head -n 1 $replica | tr -d '\r\n' | ask -x config set masterauth
if [ -n "$tls" ]; then
  ask config set tls-cert-file /etc/redis-tls/tls.crt tls-key-file /etc/redis-tls/tls.key tls-ca-cert-file /etc/redis-tls/ca.crt
  echo 'reload.sh: certificate loaded'
fi
echo "$now" > loaded
