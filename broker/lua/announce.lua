-- keys: trainers alive owners events counts tasks
-- A trainer is there. Tasks for its devices that nobody has taken from the pool yet become its own:
-- they were dispatched before it came, and nobody else has the data. ARGV[5]: the pool's group.
local name, about, devices = ARGV[1], ARGV[2], cmsgpack.unpack(ARGV[3])
guard()
local now = redis.call('TIME')
local new = redis.call('ZADD', key.alive, now[1] .. '.' .. string.format('%06d', now[2]), name)
redis.call('HSET', key.trainers, name, about)
for _, device in ipairs(devices) do redis.call('HSET', key.owners, device, name) end
if new == 1 then tell(cmsgpack.unpack(ARGV[4])) end
if new == 1 and #devices > 0 then
  local owned = {}
  for _, device in ipairs(devices) do owned[device] = true end
  for _, entry in ipairs(redis.call('XRANGE', key.tasks, '-', '+')) do
    local ok, task = pcall(cmsgpack.unpack, entry[2][2])
    local taken = redis.pcall('XPENDING', key.tasks, ARGV[5], entry[1], entry[1], 1)
    if ok and type(task) == 'table' and owned[task.device] and (taken.err or not taken[1]) then
      redis.call('XADD', key.tasks .. ':' .. name, '*', 'm', entry[2][2])
      redis.call('XDEL', key.tasks, entry[1])
    end
  end
end
return new
