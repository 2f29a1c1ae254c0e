-- keys: best
-- undeclared: events kept
-- Tells an event of the evaluator, after which no model is pinned. ARGV[2]: the measured version, if
-- it may be the best one; then it is if its value is strictly better than the best version's, or of
-- another metric. Out of memory, the first write fails.
redis.call('XADD', key.events, 'MAXLEN', '~', EVENTS_KEPT, '*', 'm', ARGV[1])
redis.call('HDEL', key.best, 'pinned')
if not ARGV[2] then return end
local a = cmsgpack.unpack(ARGV[2])
local metric, value = unpack(redis.call('HMGET', key.best, 'metric', 'value'))
if metric == a.metric then
  local gain = tonumber(a.value) - tonumber(value)
  if (a.goal == 'min' and -gain or gain) <= 0 then return end
end
redis.call(
  'HSET', key.best, 'metric', a.metric, 'value', a.value, 'version', a.version, 'digest', a.digest, 'blob', a.blob)
-- Redis was full meanwhile, and the updater deleted the model.
if not redis.call('ZSCORE', key.kept, a.blob) then redis.call('HDEL', key.best, 'blob') end
