-- keys: trainers alive owners pool tasks open admitted ended events counts
-- A trainer leaves (ARGV[2] is 0), or was not heard for so many seconds; one that said good-bye was last
-- heard at 0. If it owned devices, what waits for it is given up: nobody else has their data. -1, or
-- how many tasks that was.
local name, silent, left, lost, gone = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local heard = redis.call('ZSCORE', key.alive, name)
local owned = {} -- also by one that was never heard: nobody serves these devices
for device, owner in pairs(pairs_of(redis.call('HGETALL', key.owners))) do
  if owner == name then owned[#owned + 1] = device end
end
if not heard and #owned == 0 then return -1 end
local now = redis.call('TIME')
if heard and silent > 0 and now[1] + now[2] / 1e6 - tonumber(heard) < silent then return -1 end
local given_up, waiting = 0, stream_of(name)
redis.call('EXISTS', waiting) -- as for undeclared keys: fails here where a cluster is moving it
guard()
redis.call('ZREM', key.alive, name)
redis.call('HDEL', key.trainers, name)
redis.call('SREM', key.pool, name)
for _, device in ipairs(owned) do redis.call('HDEL', key.owners, device) end
local said_so = silent == 0 or heard and tonumber(heard) == 0
if heard then tell(cmsgpack.unpack(said_so and left or lost)) end
for _, entry in ipairs(redis.call('XRANGE', waiting, '-', '+')) do
  local task = task_of(entry)
  if task then given_up = given_up + give_up(task.task, 'owner gone', cmsgpack.unpack(gone)) end
end
redis.call('DEL', waiting)
return given_up
