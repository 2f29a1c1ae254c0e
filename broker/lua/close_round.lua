-- keys: triggers open admitted tasks ended events counts changes failing
-- undeclared: queue
local a = cmsgpack.unpack(ARGV[1])
local sent = sent_to(a.tasks)
guard()
if not take(key.triggers, a.group, a.entry) then return 'repeated' end
-- admitted updates are already in the queue, ahead of the end of the round
withdraw(a.tasks, sent, a.trainers, a.why, ARGV[3])
redis.call('XADD', key.queue, '*', 'm', ARGV[2])
return 'closed'
