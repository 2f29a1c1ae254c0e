-- keys: stream trainers alive owners pool tasks open counts rates changes working owned concurrent
-- undeclared: run head events
-- Registers a trainer and the devices that it claims, except devices that the run doesn't have,
-- that its site may not own, or that another live trainer owns (the first one keeps them). If the
-- trainer leaves, its last-heard time becomes 0. ARGV: the announcement, what to keep of it, two
-- events.
--
-- If the trainer gives a digest of its list, and a repetition would change nothing, the digest is
-- noted (`owned`): while the note is there, heartbeats will do. See `note_list`.
--
-- Tasks for its new devices that are still unclaimed in the pool move to it: they were dispatched
-- before it came, and no other trainer has the data.
local LIST_HOLDS_MS, AT_ONCE = 60000, 1000
local a = cmsgpack.unpack(ARGV[1])

-- The devices that a registered trainer claims.
local function devices_of(name)
  local ok, about = pcall(cmsgpack.unpack, redis.call('HGET', key.trainers, name) or '')
  local said = ok and type(about) == 'table' and type(about.owns) == 'table' and about.owns or {}
  local devices = {}
  for _, device in ipairs(said) do
    if type(device) == 'number' and device == device then devices[#devices + 1] = device end -- no NaN
  end
  return devices
end

local name = a.name
local own = stream_of(name)
redis.call('EXISTS', own) -- as for undeclared keys: fails here while a cluster migrates it
guard()
if not take(key.stream, a.group, a.entry) then return 'repeated' end
-- Charged by cost: each named device is looked up, and all trainers are if there may be too many.
local heard, alive = redis.call('ZSCORE', key.alive, name), redis.call('ZCARD', key.alive)
local is_new = not heard
local function note_alive()
  local now = redis.call('TIME')
  redis.call('ZADD', key.alive, now[1] .. '.' .. string.format('%06d', now[2]), name)
end
-- Costs next to nothing, so it is not charged: a site over its limit is not struck off as silent.
if not a.leaves and tonumber(heard or 0) > 0 then note_alive() end
local all = is_new and alive >= a.most
if not within('announced ' .. a.site, a.rate, 1 + #a.owns + (all and math.floor(alive / 5) or 0)) then
  count('stray:' .. reasons.ANNOUNCEMENT_OVER_LIMIT)
  return 'over'
end
if a.leaves then
  redis.call('ZADD', key.alive, 'XX', 0, name)
  redis.call('HDEL', key.concurrent, name)
  return 'leaves'
end
if is_new then
  local others = 0
  for _, other in ipairs(all and redis.call('ZRANGE', key.alive, 0, -1) or {}) do
    if site_of(other) == a.site then others = others + 1 end
  end
  if others >= a.most then
    count('stray:' .. reasons.TRAINER_OVER_LIMIT)
    return 'over'
  end
  tell_of(a.site, cmsgpack.unpack(ARGV[3]))
end
local before, wants, denied = {}, {}, {}
for _, device in ipairs(devices_of(name)) do before[device] = true end
for _, device in ipairs(a.owns) do wants[device] = true end
for _, device in ipairs(a.denied) do denied[device] = true end
note_alive()
redis.call('HSET', key.trainers, name, ARGV[2])
redis.call('HDEL', key.working, name)
redis.call('PERSIST', own) -- it may have got an expiry while its owner was unknown
if #a.owns == 0 then redis.call('SADD', key.pool, name) else redis.call('SREM', key.pool, name) end
local changed = {} -- devices that got or lost an owner
local function let_go(device)
  redis.call('HDEL', key.owners, device)
  changed[#changed + 1] = device
end
for device in pairs(before) do
  if not wants[device] and redis.call('HGET', key.owners, device) == name then let_go(device) end
end

local devices = tonumber(redis.call('HGET', key.run, 'devices') or math.huge)
local got, any, waits, owners, has = {}, false, false, {}, 0
for i, device in ipairs(a.owns) do
  local at = (i - 1) % AT_ONCE + 1
  if at == 1 then
    owners = redis.call('HMGET', key.owners, unpack(a.owns, i, math.min(i + AT_ONCE - 1, #a.owns)))
  end
  local owner = owners[at]
  local why
  has = has + 1
  if device >= devices or denied[device] then
    if owner == name then let_go(device) end
    why = denied[device] and 'site ' .. a.site .. ' may not own it'
      or string.format('the run has %d devices', devices)
  elseif owner and owner ~= name and redis.call('ZSCORE', key.alive, owner) then
    why, waits = 'it is owned by ' .. owner, true
  elseif owner ~= name then
    redis.call('HSET', key.owners, device, name)
    got[device], any, changed[#changed + 1] = true, true, device
  end
  if why then has = has - 1 end
  if why and not before[device] then -- told once, not with every announcement
    local event = cmsgpack.unpack(ARGV[4])
    event.device, event.text = device, name .. ' does not get device ' .. device .. ': ' .. why
    tell_of(a.site, event)
  end
end

note_devices(changed)
if a.concurrent then
  redis.call('HSET', key.concurrent, name, has)
else
  redis.call('HDEL', key.concurrent, name)
end
if a.digest and not waits then
  note_list(a.digest, now_ms() + LIST_HOLDS_MS)
else
  redis.call('UNLINK', key.owned)
end
if not any then return 'heard' end
local newest = tonumber(redis.call('HGET', key.head, 'version') or 0)
for _, entry in ipairs(redis.call('XRANGE', key.tasks, '-', '+')) do
  local task = task_of(entry)
  local taken = redis.pcall('XPENDING', key.tasks, a.pool, entry[1], entry[1], 1)
  if task and got[task.device] and (taken.err or not taken[1]) then
    local trigger = redis.call('HGET', key.open, task.task)
    if trigger then send(task.task, task.device, name, entry[2][2], trigger, newest) end
    redis.call('XDEL', key.tasks, entry[1])
  end
end
return 'heard'
