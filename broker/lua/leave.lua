-- keys: trainers alive owners events counts
-- A trainer that says good-bye (ARGV[2] is 0), or was not heard for so many seconds.
local name, silent = ARGV[1], tonumber(ARGV[2])
local heard = redis.call('ZSCORE', key.alive, name)
if not heard then return 0 end
if tonumber(redis.call('TIME')[1]) - tonumber(heard) < silent then return 0 end
guard()
redis.call('ZREM', key.alive, name)
redis.call('HDEL', key.trainers, name)
local owned = pairs_of(redis.call('HGETALL', key.owners))
for device, owner in pairs(owned) do
  if owner == name then redis.call('HDEL', key.owners, device) end
end
tell(cmsgpack.unpack(ARGV[3]))
return 1
