-- keys: triggers open admitted tasks ended events counts changes failing
-- Gives up tasks that have been open for too long.
local a = cmsgpack.unpack(ARGV[1])
local sent = sent_to(a.tasks)
guard()
if not take(key.triggers, a.group, a.entry) then return 'repeated' end
withdraw(a.tasks, sent, a.trainers, a.why, ARGV[2])
return 'withdrawn'
