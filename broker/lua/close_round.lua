-- keys: triggers open admitted ended events counts
-- undeclared: queue
local a = cmsgpack.unpack(ARGV[1])
guard()
if redis.call('XACK', key.triggers, a.group, a.entry) == 0 then return 'repeated' end
redis.call('XDEL', key.triggers, a.entry)
for _, task in ipairs(a.tasks) do
  -- an admitted answer is in the queue, before the end of the round: it counts
  if redis.call('HEXISTS', key.admitted, task) == 0 then
    end_task(task, '', 'given_up', a.why, cmsgpack.unpack(ARGV[3]))
  end
end
redis.call('XADD', key.queue, '*', 'm', ARGV[2])
return 'closed'
