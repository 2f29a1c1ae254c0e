-- keys: trainers alive owners tasks
-- undeclared: run events
-- A trainer is there, and owns the devices that it says: unless the run has no such device, or another
-- that is alive owns it (the first one keeps it). ARGV: name, what it says of itself with `owns`, two
-- events, the pool's group. Those it does not get, with their owner ('' if there is none).
--
-- Tasks for devices new to it that nobody has taken from the pool yet become its own: they were
-- dispatched before it came, and nobody else has the data.
local name, group = ARGV[1], ARGV[5]
local wanted = cmsgpack.unpack(ARGV[2]).owns
local before, wants = {}, {}
for _, device in ipairs(devices_of(name)) do before[device] = true end
for _, device in ipairs(wanted) do wants[device] = true end
local now = redis.call('TIME')
-- the first write, which fails without memory
local new = redis.call('ZADD', key.alive, now[1] .. '.' .. string.format('%06d', now[2]), name)
redis.call('HSET', key.trainers, name, ARGV[2])
if new == 1 then tell(cmsgpack.unpack(ARGV[3])) end
for device in pairs(before) do
  if not wants[device] and redis.call('HGET', key.owners, device) == name then
    redis.call('HDEL', key.owners, device)
  end
end

local devices = tonumber(redis.call('HGET', key.run, 'devices') or math.huge)
local got, any, refused = {}, false, {}
for _, device in ipairs(wanted) do
  local owner = redis.call('HGET', key.owners, device)
  local why
  if device >= devices then
    if owner == name then redis.call('HDEL', key.owners, device) end
    owner, why = '', string.format('the run has %d devices', devices)
  elseif owner and owner ~= name and redis.call('ZSCORE', key.alive, owner) then
    why = 'it is owned by ' .. owner
  elseif owner ~= name then
    redis.call('HSET', key.owners, device, name)
    got[device], any = true, true
  end
  if why then
    refused[#refused + 1] = {device, owner}
    if not before[device] then -- once, and not with every announcement
      local event = cmsgpack.unpack(ARGV[4])
      event.device, event.text = device, name .. ' does not get device ' .. device .. ': ' .. why
      tell(event)
    end
  end
end

if not any then return refused end
for _, entry in ipairs(redis.call('XRANGE', key.tasks, '-', '+')) do
  local task = task_of(entry)
  local taken = redis.pcall('XPENDING', key.tasks, group, entry[1], entry[1], 1)
  if task and got[task.device] and (taken.err or not taken[1]) then
    redis.call('XADD', key.tasks .. ':' .. name, '*', 'm', entry[2][2])
    redis.call('XDEL', key.tasks, entry[1])
  end
end
return refused
