-- keys: tasks alive pool owners open admitted ended events counts changes failing
-- undeclared: head
-- If every live trainer owns devices, no trainer reads the pool's stream. A task left there without
-- a live lease (idle for ARGV[2] ms) moves to its device's owner; if there is none, it is given up.
local group, lease, event = ARGV[1], tonumber(ARGV[2]), ARGV[3]
if pool_serves() or redis.call('ZCOUNT', key.alive, '(0', '+inf') == 0 then return 0 end
guard()
local given_up = 0
local newest = tonumber(redis.call('HGET', key.head, 'version') or 0)
for _, entry in ipairs(redis.call('XRANGE', key.tasks, '-', '+')) do
  local task = task_of(entry)
  local lent = redis.pcall('XPENDING', key.tasks, group, entry[1], entry[1], 1)
  local held = lent[1] and lent[1][3] < lease
  if task and not held then
    local owner = redis.call('HGET', key.owners, task.device)
    local trigger = redis.call('HGET', key.open, task.task)
    if owner and trigger then
      send(task.task, task.device, owner, entry[2][2], trigger, newest)
    else
      given_up = given_up + give_up(task.task, reasons.UNSERVED, cmsgpack.unpack(event))
    end
    redis.pcall('XACK', key.tasks, group, entry[1])
    redis.call('XDEL', key.tasks, entry[1])
  end
end
return given_up
