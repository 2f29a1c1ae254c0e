-- keys: tasks open admitted ended events counts
-- Gives up the tasks that wait for a trainer which will not come back. ARGV: reason, the event.
guard()
local given_up = 0
for _, entry in ipairs(redis.call('XRANGE', key.tasks, '-', '+')) do
  local ok, task = pcall(cmsgpack.unpack, entry[2][2])
  if ok and type(task) == 'table' and task.task then
    given_up = given_up + end_task(task.task, '', 'given_up', ARGV[1], cmsgpack.unpack(ARGV[2]))
  end
end
redis.call('DEL', key.tasks)
return given_up
