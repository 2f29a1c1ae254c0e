-- keys: run
-- undeclared: events
if redis.call('HGET', key.run, 'state') ~= 'running' then return 0 end
-- out of memory, this first write fails and nothing is done
redis.call('HSET', key.run, 'state', 'finished', 'why', ARGV[1], 'finished', ARGV[2])
tell(cmsgpack.unpack(ARGV[3]))
return 1
