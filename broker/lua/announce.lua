-- keys: trainers alive owners events counts
local name, about, devices = ARGV[1], ARGV[2], cmsgpack.unpack(ARGV[3])
guard()
local now = redis.call('TIME')
local new = redis.call('ZADD', key.alive, now[1] .. '.' .. string.format('%06d', now[2]), name)
redis.call('HSET', key.trainers, name, about)
for _, device in ipairs(devices) do redis.call('HSET', key.owners, device, name) end
if new == 1 then tell(cmsgpack.unpack(ARGV[4])) end
return new
