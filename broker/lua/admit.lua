-- keys: stream open admitted ended events counts rates
-- undeclared: run head lineage queue
-- Admission by metadata: a task of this site, first answer, device, layout, size, base, staleness now.
-- ARGV: what was said, the entry for the queue, the event's fields. rest[1]: the blob. Of a site that is
-- not trusted the staleness counts from the version that was the newest when the task was handed out.
local a, event = cmsgpack.unpack(ARGV[1]), cmsgpack.unpack(ARGV[3])
local blob = KEYS[first_rest]
guard()
if redis.call('XACK', key.stream, a.group, a.entry) == 0 then return {'repeated', ''} end
redis.call('XDEL', key.stream, a.entry)

local function astray(why)
  stray(a.site, a.task, why, event)
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
  if not attempt then return astray('unknown task') end
  if attempt == a.attempt then return {'admitted', ''} end -- the same answer, told again
  return astray(outcome == 'given_up' and 'late' or 'answered twice')
end
local task = cmsgpack.unpack(trigger)
-- One that was handed out to nobody: Redis went back to before that. The pool may say it then.
if task.site ~= a.site and (task.site or not a.trusted) then return astray("another site's task") end
local first = redis.call('HGET', key.admitted, a.task)
if first == a.attempt then return {'admitted', ''} end
if first then return astray('answered twice') end

if task.device ~= a.device then return refused('another device') end
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
local since = a.trusted and a.tau or task.handed
event.staleness = a.tau <= head and head - since or nil
if a.layout ~= layout then return refused('layout') end
if a.size > a.size_limit then return refused('too large') end
if a.size ~= tonumber(size) then return refused('size') end
if redis.call('HGET', key.lineage, a.tau) ~= a.base then return refused('unknown base') end
if a.tau < since then return refused('unknown base') end -- older than its task
if max_staleness and head - since > tonumber(max_staleness) then return refused('too stale') end
local written = redis.pcall('HGET', blob, 'size')
if not written or type(written) == 'table' then return refused('blob missing') end
if tonumber(written) ~= a.size then return refused('size') end
redis.call('PERSIST', blob)
redis.call('HSET', key.admitted, a.task, a.attempt)
redis.call('XADD', key.queue, '*', 'm', a.trusted and ARGV[2] or with(ARGV[2], {handed = since}))
return {'admitted', ''}
