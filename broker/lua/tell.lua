-- keys: best
-- undeclared: events kept
-- Tells an event of the evaluator, after which no model is pinned. ARGV[2]: the measured version, if
-- it may be the best one. Out of memory, the first write fails.
redis.call('XADD', key.events, 'MAXLEN', '~', EVENTS_KEPT, '*', 'm', ARGV[1])
redis.call('HDEL', key.best, 'pinned')
if ARGV[2] then keep_if_best(ARGV[2]) end
