-- keys: stream evaluation evaluations measured counts rates
-- undeclared: events
-- Admits a device's answer to an evaluation: its task is open, and of this site. ARGV: about the
-- answer, the answer, and the event's fields. Returns a verdict and the outcome.
local a = cmsgpack.unpack(ARGV[1])
guard()
if not take(key.stream, a.group, a.entry) then return {'repeated', ''} end
local function astray(why)
  stray(a.site, a.task, why, cmsgpack.unpack(ARGV[3]))
  return {'stray', why}
end
local asked = redis.call('HGET', key.evaluations, a.device)
local task = asked and cmsgpack.unpack(asked) or {}
if task.task ~= a.task then
  local ended = redis.call('HGET', key.measured, a.device)
  ended = ended and cmsgpack.unpack(ended) or {}
  if ended.task ~= a.task then return astray(reasons.LATE) end
  if ended.attempt ~= a.attempt then return astray(reasons.ANSWERED_TWICE) end
  return {'evaluated', ended.outcome}
end
if task.site ~= a.site then return astray(reasons.ANOTHER_SITES_TASK) end
local version, base = unpack(redis.call('HMGET', key.evaluation, 'version', 'base'))
local is_asked = version == a.version and base == a.base
local outcome = is_asked and a.outcome or reasons.NOT_AS_ASKED
redis.call('HDEL', key.evaluations, a.device)
redis.call('HSET', key.measured, a.device, cmsgpack.pack({
  task = a.task, attempt = a.attempt, outcome = outcome,
  answer = outcome == reasons.MEASURED and ARGV[2] or '',
}))
count('evaluated:' .. outcome)
return {'evaluated', outcome}
