-- keys: tokens staged device
-- What a strategy remembers of a device takes the place of what it remembered before, whole and only by
-- the updater's rightful holder. ARGV: token, size in bytes, digest. Repeated after a lost reply, it finds
-- what was staged gone, and the same already there.
local token, size, digest = unpack(ARGV)
local foreign = fenced(token, 'updater')
if foreign then return foreign end
if redis.call('HGET', key.staged, 'size') ~= size then return 'unwritten' end
redis.call('HSET', key.staged, 'digest', digest) -- takes memory: without any, nothing is done
redis.call('PERSIST', key.staged)
redis.call('RENAME', key.staged, key.device) -- where it is denied, what was there stays
return 'done'
