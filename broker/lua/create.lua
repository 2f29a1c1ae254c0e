-- keys: tokens run head blob models kept lineage counts
-- The run with the version that it starts from, or its newest version again because Redis lost it. An
-- emptied Redis gets the run's counts too, so that they and the scheduler's draws go on.
local a = cmsgpack.unpack(ARGV[1])
local foreign = fenced(a.token, 'updater')
if foreign then return foreign end
local emptied = redis.call('EXISTS', key.run) == 0
guard()
if redis.call('HGET', key.blob, 'size') ~= a.size then return 'unwritten' end
redis.call('PERSIST', key.blob)
if emptied then
  for name, n in pairs(a.counts) do redis.call('HINCRBY', key.counts, name, n) end
end
local state, why, finished = unpack(redis.call('HMGET', key.run, 'state', 'why', 'finished'))
redis.call('HSET', key.run, unpack(a.run))
if state == 'finished' then -- somebody ended it meanwhile: it stays ended
  redis.call('HSET', key.run, 'state', state, 'why', why, 'finished', finished)
end
redis.call('HSET', key.head, unpack(a.head))
redis.call('HSET', key.lineage, a.version, a.digest)
redis.call('ZADD', key.kept, a.version, a.blob)
redis.call('XADD', key.models, 'MAXLEN', '~', VERSIONS_TOLD, '*', 'm', ARGV[2])
return 'created'
