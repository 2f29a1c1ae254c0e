-- keys: best
-- undeclared: kept
-- Keeps a published model while it is measured; 0 if its blob is gone.
if not redis.call('ZSCORE', key.kept, ARGV[1]) then return 0 end
redis.call('HSET', key.best, 'pinned', ARGV[1])
return 1
