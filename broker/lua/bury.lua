-- keys: stream open admitted ended events counts
-- undeclared: dead
-- An entry that can't be processed leaves its stream for `dead`; its task, if it has one, ends,
-- unless another answer to it was admitted, or a site (ARGV[7], if one said so) was not given it.
local group, entry, dead, task, reason, event, site = unpack(ARGV)
guard()
if group ~= '' and redis.call('XACK', key.stream, group, entry) == 0 then return 0 end
if redis.call('XDEL', key.stream, entry) == 0 then return 0 end
bury(dead)
local trigger = task ~= '' and redis.call('HGET', key.open, task)
local may = trigger and (site == '' or (cmsgpack.unpack(trigger).site or 'pool') == site)
if may and redis.call('HEXISTS', key.admitted, task) == 0 then
  end_task(task, '', 'dead', reason, cmsgpack.unpack(event))
end
return 1
