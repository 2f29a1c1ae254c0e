-- keys: evaluation evaluations measured counts
-- undeclared: queue tasks
-- Ends an evaluation: the devices without an answer count as such, and their tasks' entries are
-- deleted. ARGV: the evaluation's id, how many devices have answered, the entry for the queue, the
-- trainers' group. Returns 'ended', 'more' if other devices have answered since, or 'over'.
local id, answered, message, group = unpack(ARGV)
if redis.call('HGET', key.evaluation, 'id') ~= id then return 'over' end
if redis.call('HLEN', key.measured) ~= tonumber(answered) then return 'more' end
local asked = redis.call('HVALS', key.evaluations)
for i, packed in ipairs(asked) do
  asked[i] = cmsgpack.unpack(packed)
  redis.call('EXISTS', stream_of(asked[i].owner)) -- fails here while a cluster migrates it
end
guard()
for _, task in ipairs(asked) do
  redis.pcall('XACK', stream_of(task.owner), group, task.entry)
  redis.pcall('XDEL', stream_of(task.owner), task.entry)
  count('evaluated:' .. reasons.NO_ANSWER)
end
redis.call('XADD', key.queue, '*', 'm', message)
redis.call('DEL', key.evaluation, key.evaluations, key.measured)
return 'ended'
