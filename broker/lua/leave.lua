-- keys: trainers alive owners pool tasks open admitted ended events counts changes working owned concurrent failing
-- Deregisters a trainer that leaves (ARGV[2] is 0) or was not heard from for ARGV[2] seconds; the
-- last-heard time of one that has said good-bye is 0. Tasks waiting for it are given up: no other
-- trainer has its devices' data. Returns how many, or -1 if the trainer stays or isn't known.
local name, silent, left, lost, gone = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local heard = redis.call('ZSCORE', key.alive, name)
local owned = {} -- also if the owner was never heard from: its devices are unserved
for device, owner in pairs(pairs_of(redis.call('HGETALL', key.owners))) do
  if owner == name then owned[#owned + 1] = device end
end
if not heard and #owned == 0 then return -1 end
local now = redis.call('TIME')
if heard and silent > 0 and now[1] + now[2] / 1e6 - tonumber(heard) < silent then return -1 end
local given_up, waiting = 0, stream_of(name)
redis.call('EXISTS', waiting) -- as for undeclared keys: fails here while a cluster migrates it
guard()
redis.call('ZREM', key.alive, name)
redis.call('HDEL', key.trainers, name)
redis.call('SREM', key.pool, name)
redis.call('HDEL', key.working, name)
redis.call('HDEL', key.concurrent, name)
redis.call('UNLINK', key.owned)
for _, device in ipairs(owned) do redis.call('HDEL', key.owners, device) end
note_devices(owned)
local said_so = silent == 0 or heard and tonumber(heard) == 0
if heard then tell(cmsgpack.unpack(said_so and left or lost)) end
for _, entry in ipairs(redis.call('XRANGE', waiting, '-', '+')) do
  local task = task_of(entry)
  if task then given_up = given_up + give_up(task.task, reasons.OWNER_GONE, cmsgpack.unpack(gone)) end
end
redis.call('DEL', waiting)
return given_up
