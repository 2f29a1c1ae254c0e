-- keys: tokens staged device
-- Replaces a strategy's state of a device with the staged one, atomically and only for the holder
-- of the updater's role. ARGV: token, size in bytes, digest, number of chunks. When repeated after a lost reply, the
-- staged state is gone and already in place.
local token, size, digest, chunks = unpack(ARGV)
local foreign = fenced(token, 'updater')
if foreign then return foreign end
if redis.call('HGET', key.staged, 'size') ~= size then return 'unwritten' end
redis.call('HSET', key.staged, 'digest', digest, 'chunks', chunks) -- takes memory: if there is none, nothing is done
redis.call('PERSIST', key.staged)
redis.call('RENAME', key.staged, key.device) -- if this is denied, the previous state stays
return 'done'
