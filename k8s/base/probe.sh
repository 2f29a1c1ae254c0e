#!/bin/sh
# What the kubelet asks of Redis and Sentinel, as the user who may PING and nothing else.
#   alive   it answers, if only that it reads its file or waits for its master; not, that a script keeps it busy
#   ready   it serves
# redis-cli exits with 0 whatever the answer is.
case $1 in
  alive) wanted='PONG|LOADING .*|MASTERDOWN .*' ;;
  ready) wanted=PONG ;;
  *) echo "alive or ready, not '$1'" >&2; exit 2 ;;
esac
tls=
[ ! -f /etc/redis/tls.inc ] || tls='--tls --insecure' # component redis-tls; to itself, whose certificate may just be changing
redis-cli -h "$POD_IP" -p "${PORT:-6379}" $tls --user health --pass x --no-auth-warning ping | grep -qxE "$wanted"
