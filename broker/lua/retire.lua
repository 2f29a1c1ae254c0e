-- keys: tokens kept best
-- Deletes models early, even the best version's. No memory guard here: freeing memory must not need
-- any. rest: the keys of the blobs named in ARGV.
local foreign = fenced(ARGV[1], 'updater')
if foreign then return foreign end
local best = redis.call('HGET', key.best, 'blob')
for i = 2, #ARGV do
  redis.call('ZREM', key.kept, ARGV[i])
  if ARGV[i] == best then redis.call('HDEL', key.best, 'blob') end
end
for i = first_rest, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 'done'
