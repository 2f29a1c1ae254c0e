-- keys: evaluation evaluations measured counts best
-- undeclared: queue tasks kept
-- Ends an evaluation: the devices without an answer count as such, also those that were not asked
-- yet, and their tasks' entries are deleted. ARGV: the evaluation's id, how many devices have
-- answered, how many it has, the entry for the queue, the trainers' group; the version, if it may be
-- the best one. Returns 'ended', 'more' if other devices have answered since, or 'over'.
local id, answered, devices, message, group = unpack(ARGV)
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
end
local unanswered = devices - answered
if unanswered > 0 then
  redis.call('HINCRBY', key.counts, 'evaluations', unanswered - #asked)
  redis.call('HINCRBY', key.counts, 'evaluated:' .. reasons.NO_ANSWER, unanswered)
end
redis.call('XADD', key.queue, '*', 'm', message)
if ARGV[6] then keep_if_best(ARGV[6]) end
redis.call('DEL', key.evaluation, key.evaluations, key.measured)
return 'ended'
