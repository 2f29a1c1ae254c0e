-- keys: tokens run head blob models kept lineage counts
-- The run with the version that it starts from, once: a run that is there stays as it is, unless the
-- updater publishes its newest version `again` because Redis lost it.
local a = cmsgpack.unpack(ARGV[1])
local foreign = fenced(a.token, 'updater')
if foreign then return foreign end
if not a.again and redis.call('EXISTS', key.run) == 1 then return 'exists' end
guard()
if redis.call('HGET', key.blob, 'size') ~= a.size then return 'unwritten' end
redis.call('PERSIST', key.blob)
redis.call('HSET', key.run, unpack(a.run))
redis.call('HSET', key.head, unpack(a.head))
redis.call('HSET', key.lineage, a.version, a.digest)
redis.call('ZADD', key.kept, a.version, a.blob)
redis.call('XADD', key.models, 'MAXLEN', '~', VERSIONS_TOLD, '*', 'm', ARGV[2])
return 'created'
