-- keys: triggers open tasks owners counts rates ended
-- undeclared: run
-- A trigger becomes a task. The scheduler's are in `open` already; a device's own enter it here,
-- within its rate and the limit, one at a time. A device that a trainer owns is that trainer's to serve.
local a = cmsgpack.unpack(ARGV[1])
local function is_busy(device)
  for _, trigger in ipairs(redis.call('HVALS', key.open)) do
    if cmsgpack.unpack(trigger).device == device then return true end
  end
end
local owner = redis.call('HGET', key.owners, a.device)
local stream = owner and key.tasks .. ':' .. owner or key.tasks
redis.call('EXISTS', stream) -- as for undeclared keys: fails here where a cluster is moving it
guard()
if redis.call('XACK', key.triggers, a.group, a.entry) == 0 then return 'repeated' end
redis.call('XDEL', key.triggers, a.entry)
local is_open = redis.call('HEXISTS', key.open, a.task) == 1
if a.origin == 'scheduler' then
  if not is_open then return 'ended' end
else
  if is_open or ended_as(a.task) then return 'repeated' end
  if redis.call('HGET', key.run, 'state') ~= 'running' then return 'finished' end
  local second = redis.call('TIME')[1]
  if redis.call('HGET', key.rates, '') ~= second then -- what they asked for before counts no more
    redis.call('DEL', key.rates)
    redis.call('HSET', key.rates, '', second)
  end
  local used = tonumber(redis.call('HGET', key.rates, a.origin) or 0) or 0
  if used >= a.rate or redis.call('HLEN', key.open) >= a.limit then
    count('stray:trigger over the limit')
    return 'limited'
  end
  if is_busy(a.device) then
    count('stray:trigger for a busy device')
    return 'busy'
  end
  redis.call('HSET', key.rates, a.origin, used + 1)
  redis.call('HSET', key.open, a.task, ARGV[3])
  count('issued')
end
redis.call('XADD', stream, '*', 'm', ARGV[2])
return 'sent'
