-- keys: uploads open admitted ended events counts
-- undeclared: run head lineage queue
-- Admission by metadata: known task, first answer, device, layout, size, base, staleness now. ARGV:
-- what was said, the entry for the queue, the event's fields. rest[1]: the blob.
local a, event = cmsgpack.unpack(ARGV[1]), cmsgpack.unpack(ARGV[3])
local blob = KEYS[first_rest]
guard()
if redis.call('XACK', key.uploads, a.group, a.entry) == 0 then return {'repeated', ''} end
redis.call('XDEL', key.uploads, a.entry)

local function stray(why)
  count('stray:' .. why)
  event.what, event.task, event.reason = 'stray', a.task, why
  tell(event)
  redis.call('UNLINK', blob)
  return {'stray', why}
end

local function refused(why)
  end_task(a.task, a.attempt, 'refused', why, event)
  redis.call('UNLINK', blob)
  return {'refused', why}
end

local trigger = redis.call('HGET', key.open, a.task)
if not trigger then
  local attempt, outcome = ended_as(a.task)
  if not attempt then return stray('unknown task') end
  if attempt == a.attempt then return {'admitted', ''} end -- the same answer, told again
  return stray(outcome == 'given_up' and 'late' or 'answered twice')
end
local first = redis.call('HGET', key.admitted, a.task)
if first == a.attempt then return {'admitted', ''} end
if first then return stray('answered twice') end

if cmsgpack.unpack(trigger).device ~= a.device then return refused('another device') end
if a.give_up then
  end_task(a.task, a.attempt, 'given_up', a.give_up, event)
  return {'given_up', a.give_up}
end
local state, layout, size, max_staleness =
  unpack(redis.call('HMGET', key.run, 'state', 'layout', 'size', 'max_staleness'))
local head = tonumber(redis.call('HGET', key.head, 'version') or '-1')
if state ~= 'running' then
  end_task(a.task, a.attempt, 'given_up', 'run finished', event)
  redis.call('UNLINK', blob)
  return {'given_up', 'run finished'}
end
event.staleness = a.tau <= head and head - a.tau or nil
if a.layout ~= layout then return refused('layout') end
if a.size > a.size_limit then return refused('too large') end
if a.size ~= tonumber(size) then return refused('size') end
if redis.call('HGET', key.lineage, a.tau) ~= a.base then return refused('unknown base') end
if max_staleness and head - a.tau > tonumber(max_staleness) then return refused('too stale') end
local written = redis.pcall('HGET', blob, 'size')
if not written or type(written) == 'table' then return refused('blob missing') end
if tonumber(written) ~= a.size then return refused('size') end
redis.call('PERSIST', blob)
redis.call('HSET', key.admitted, a.task, a.attempt)
redis.call('XADD', key.queue, '*', 'm', ARGV[2])
return {'admitted', ''}
