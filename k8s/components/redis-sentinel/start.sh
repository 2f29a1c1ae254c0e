#!/bin/sh
# What the pods of Redis and Sentinel do besides running: find the master, and hand it over.
#   redis     start Redis, as replica of the master if there is one
#   ready     whether Redis has what the master has: a rolling update waits for that before it takes the next one
#   leave     before Redis stops: if it is the master, let another take over
#   sentinel  start Sentinel
#   reload    have Sentinel take up what was renewed in its Secrets; before each liveness probe
# ADDRESS is the pod's own name, NODES and SENTINELS are everybody's.
set -eu

master_name=fedstream

# Component redis-tls: Redis speaks TLS alone, and so do the Sentinels.
tls=
[ ! -f /etc/redis/tls.inc ] || tls='--tls --cacert /etc/redis-tls/ca.crt'

hash() { printf %s "$1" | sha256sum | cut -d ' ' -f 1; }

# passwords USER: those that its Secret has, one a line; two while one is replaced, the new one first
passwords() { tr -d '\r' < "/etc/redis-passwords/replication/$1" | grep .; }

newest() { passwords "$1" | head -n 1; }

hashes() { passwords "$1" | while IFS= read -r password; do printf '#%s ' "$(hash "$password")"; done; }

# as PASSWORD HOST PORT COMMAND...: the reply as user sentinel; nothing if there is none within 3 s
as() {
  password=$1 host=$2 port=$3
  shift 3
  REDISCLI_AUTH=$password timeout ${within:-3} redis-cli -h "$host" -p "$port" $tls --user sentinel --no-auth-warning "$@" \
    2>/dev/null </dev/null || true
}

# ask HOST PORT COMMAND...: the same with the first password that is accepted
ask() {
  passwords sentinel | while IFS= read -r password; do
    said=$(as "$password" "$@")
    case $said in NOAUTH*) ;; *) echo "$said"; return ;; esac
  done
}

# The password with which a Sentinel asks the others: the newest that all of them accept, or else the oldest. A Redis that
# refuses a Sentinel is down to it. Nobody is asked while there is only one.
accepted() {
  within=2 # a probe waits
  passwords sentinel | sed '$d' | while IFS= read -r password; do
    for place in $(printf '%s:6379 ' $NODES) $(printf '%s:26379 ' $SENTINELS); do
      [ "${place%:*}" = "$ADDRESS" ] || [ "$(as "$password" "${place%:*}" "${place#*:}" ping)" = PONG ] || continue 2
    done
    echo "$password"
    return
  done | grep . || passwords sentinel | tail -n 1
}

tls_files() { cat /etc/redis-tls/* 2>/dev/null | sha256sum; }

# itself COMMAND...: the reply of this pod's own Sentinel, as user reload
itself() {
  REDISCLI_AUTH=$(cat reload) timeout 3 redis-cli -h "$POD_IP" -p 26379 $tls ${tls:+--insecure} --user reload \
    --no-auth-warning "$@" 9>&- || true
}

# must NAME [-x COMMAND...]: have it do the command on stdin, or this one, whose last argument is on stdin: others can see
# arguments in /proc
must() {
  name=$1
  shift
  said=$(itself "$@")
  [ "$said" = OK ] && return
  echo "start.sh: $name: ${said:-no answer}" >&2
  return 1
}

# The master by a Sentinel's word; nothing if none answers.
agreed() {
  for host in $SENTINELS; do
    [ "$host" = "$ADDRESS" ] && continue
    found=$(ask "$host" 26379 sentinel get-master-addr-by-name $master_name | head -n 1)
    case $found in *.*) echo "$found"; return ;; esac
  done
}

# The master by its own word, one that has replicas first; nothing if there is none.
acting() {
  lone=
  for host in $NODES; do
    case $(ask "$host" 6379 info replication | tr -d '\r' | grep -E '^(role|connected_slaves):' | tr '\n' ' ') in
      'role:master connected_slaves:0 ') lone=${lone:-$host} ;;
      'role:master '*) echo "$host"; return ;;
    esac
  done
  echo "$lone"
}

# The master by the word of a replica that holds data; nothing if there is none.
followed() {
  for host in $NODES; do
    said=$(ask "$host" 6379 info | tr -d '\r')
    case $said in *role:slave*db[0-9]*:keys=*) echo "$said" | sed -n 's/^master_host://p'; return ;; esac
  done
}

# Whoever is, or was last, the master; nothing if there never was one.
known() {
  found=$(agreed)
  [ -n "$found" ] || found=$(acting)
  [ -n "$found" ] || found=$(followed) # the Sentinels may only be slow
  echo "$found"
}

case $1 in
  redis)
    conf=/run/redis/redis.conf # Sentinel has it rewritten
    master=$(known)
    # No persistence: a master that restarts is empty, and its replicas would become so after it. One of them takes over first.
    tries=0
    while [ "$master" = "$ADDRESS" ] && [ $tries -lt 60 ]; do
      [ $tries -gt 0 ] || echo "$ADDRESS: was the master, waiting for another to take over"
      sleep 1
      tries=$((tries + 1))
      master=$(known)
    done
    [ -n "$master" ] || master=${NODES%% *} # the very first start
    umask 077
    cp /etc/redis/redis.conf $conf
    cat >> $conf <<EOF
dir /var/lib/redis
# Else what it was sent last stays there, and the next one beside it may be more than the volume holds.
rdb-del-sync-files yes
masteruser replica
masterauth "$(newest replica)"
replica-announce-ip $ADDRESS
# A master that is cut off takes no writes: the services wait, and find the new one.
min-replicas-to-write 1
min-replicas-max-lag 10
EOF
    [ "$master" = "$ADDRESS" ] || echo "replicaof $master 6379" >> $conf
    echo "$ADDRESS: master is $master"
    exec redis-server $conf
    ;;

  ready)
    ask "$POD_IP" 6379 info replication | tr -d '\r' | grep -qxE 'role:master|master_link_status:up'
    ;;

  leave)
    [ "$(agreed)" = "$ADDRESS" ] || exit 0
    for host in $SENTINELS; do
      [ "$(ask "$host" 26379 sentinel failover $master_name)" = OK ] && break
    done
    tries=0
    while [ "$(agreed)" = "$ADDRESS" ] && [ $tries -lt 20 ]; do
      sleep 1
      tries=$((tries + 1))
    done
    ;;

  sentinel)
    conf=/run/redis/sentinel.conf
    # Not before there is one: a Redis that a Sentinel names would wait for another to take over.
    master=
    while [ -z "$master" ]; do
      master=$(agreed)
      [ -n "$master" ] || master=$(acting)
      [ -n "$master" ] || sleep 1
    done
    umask 077
    cd /run/redis
    head -c 32 /dev/urandom | sha256sum | cut -d ' ' -f 1 > reload
    # Its id is its name's: one that restarts is the same one, and not a fourth that has a vote.
    # failover-timeout: after a failed election the next one comes after twice this time. An emptied master waits 60 s for
    # another to take over: 10 s allows three elections in that time, 30 s only one.
    cat > $conf <<EOF
bind $POD_IP
$([ -z "$tls" ] && echo port 26379 || sed 's/^tls-port .*/tls-port 26379/' /etc/redis/tls.inc)
dir /run/redis
sentinel myid $(printf %s "$ADDRESS" | sha1sum | cut -d ' ' -f 1)
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $ADDRESS
sentinel announce-port 26379
sentinel monitor $master_name $master 6379 2
sentinel auth-user $master_name sentinel
sentinel auth-pass $master_name "$(accepted)"
sentinel down-after-milliseconds $master_name 5000
sentinel failover-timeout $master_name 10000
sentinel parallel-syncs $master_name 1
sentinel sentinel-user sentinel
sentinel sentinel-pass "$(accepted)"
user default off
user sentinel on $(hashes sentinel) allkeys allchannels +@all
user watch on $(hashes watch) allchannels -@all +ping +hello +role +subscribe +psubscribe +client|setname +sentinel|get-master-addr-by-name +sentinel|master +sentinel|masters +sentinel|replicas +sentinel|sentinels
user health on nopass -@all +ping
user reload on #$(hash "$(cat reload)") -@all +acl|setuser +sentinel|set +sentinel|config +shutdown
EOF
    tls_files > tls-loaded
    rm -f passwords-loaded
    echo "$ADDRESS: master is $master"
    exec redis-server $conf --sentinel
    ;;

  reload)
    cd /run/redis
    exec 9>reload.lock # an older process would set older passwords
    flock -w 2 9 || { echo 'start.sh: another reload is running' >&2; exit 1; }
    asks_with=$(accepted)
    now=$(echo "$asks_with" | cat - /etc/redis-passwords/replication/* | sha256sum)
    if [ "$now" != "$(cat passwords-loaded 2>/dev/null)" ]; then
      rm -f passwords-loaded
      for user in sentinel watch; do
        echo "acl setuser $user on resetpass $(hashes $user)" | must 'acl setuser'
      done
      printf %s "$asks_with" | must 'sentinel set' -x sentinel set $master_name auth-pass
      printf %s "$asks_with" | must 'sentinel config set' -x sentinel config set sentinel-pass
      echo "$now" > passwords-loaded
    fi
    # A Sentinel reads certificates only when it starts. They restart one after another: 30 s after the files' change, 60, 90.
    [ -n "$tls" ] && [ "$(tls_files)" != "$(cat tls-loaded)" ] || exit 0
    number=${ADDRESS%%.*}
    [ $(($(date +%s) - $(stat -L -c %Y /etc/redis-tls/tls.crt))) -lt $((30 + 30 * ${number##*-})) ] || itself shutdown
    ;;
esac
