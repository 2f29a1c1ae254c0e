-- keys: triggers open admitted tasks owners ended events counts
-- Tasks that were open for too long are given up.
local a = cmsgpack.unpack(ARGV[1])
local streams = streams_of(a.tasks)
guard()
if redis.call('XACK', key.triggers, a.group, a.entry) == 0 then return 'repeated' end
redis.call('XDEL', key.triggers, a.entry)
withdraw(a.tasks, streams, a.trainers, a.why, ARGV[2])
return 'withdrawn'
