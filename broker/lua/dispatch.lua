-- keys: stream open tasks owners counts rates ended changes failing
-- undeclared: run head
-- Turns a trigger into a task. Those of a retry, or of a scheduler of an earlier release, are already
-- in `open`. One from a site's inbox (`a.site`) is added here, if devices decide by themselves in this
-- run, the device is the site's, has no open task, no update in a private batch and none in a recent
-- sum that it sits out, and neither the site's rate nor the limit is exceeded. An owned device is
-- served by its owner.
local a = cmsgpack.unpack(ARGV[1])
local function is_busy(device)
  for _, trigger in ipairs(redis.call('HVALS', key.open)) do
    if cmsgpack.unpack(trigger).device == device then return true end
  end
  if (redis.call('HGET', key.run, 'policy') or '') == '' then return false end
  local held = redis.call('HGET', key.head, 'held') or ''
  if string.find(' ' .. held .. ' ', ' ' .. device .. ' ', 1, true) then return true end
  local packed = redis.call('HGET', key.head, 'privacy')
  for _, one in ipairs(packed and cmsgpack.unpack(packed).recent or {}) do
    if one == device then return true end
  end
  return false
end
local owner = redis.call('HGET', key.owners, a.device)
local stream, memory, copy = places(a.device, owner)
redis.call('EXISTS', stream, memory, copy) -- fails here while a cluster migrates them
guard()
if not take(key.stream, a.group, a.entry) then return 'repeated' end
local trigger = redis.call('HGET', key.open, a.task)
local newest = tonumber(redis.call('HGET', key.head, 'version') or 0)
if not a.site then
  if not trigger then return 'ended' end
  send(a.task, a.device, owner, ARGV[2], trigger, newest)
  return 'sent'
end
if not within('trigger ' .. a.site, a.rate) then
  count('stray:' .. reasons.TRIGGER_OVER_LIMIT)
  return 'limited'
end
if not a.anarchic then
  count('stray:' .. reasons.OWN_TRIGGER)
  return 'unasked'
end
if trigger or ended_as(a.task) then return 'repeated' end
local state, devices = unpack(redis.call('HMGET', key.run, 'state', 'devices'))
if state ~= 'running' then return 'finished' end
if a.device >= tonumber(devices) or (owner and site_of(owner) or 'pool') ~= a.site then
  count('stray:' .. reasons.ANOTHERS_DEVICE)
  return 'foreign'
end
if is_quarantined(a.device) then
  count('stray:' .. reasons.QUARANTINED_DEVICE)
  return 'quarantined'
end
if is_spent(a.device) then
  count('stray:' .. reasons.SPENT_DEVICE)
  return 'spent'
end
local till_ms = string.match(redis.call('HGET', key.failing, a.device) or '', '^%d+ (%d+)')
local left_ms = tonumber(till_ms or 0) - now_ms()
if left_ms > 0 and left_ms <= 1000 * LONGEST_REST_S then -- longer if the clock was set back
  count('stray:' .. reasons.RESTING_DEVICE)
  return 'resting'
end
if redis.call('HLEN', key.open) >= a.limit then
  count('stray:' .. reasons.TRIGGER_OVER_LIMIT)
  return 'limited'
end
if is_busy(a.device) then
  count('stray:' .. reasons.BUSY_DEVICE)
  return 'busy'
end
count('issued')
note_task(a.task)
send(a.task, a.device, owner, ARGV[2], ARGV[3], newest)
return 'sent'
