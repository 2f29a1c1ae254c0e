-- keys: run head open triggers dead ended counts changes
-- Retries a dead letter's work as a new task, because the old one has ended, and deletes the
-- letter. Two letters may be about one task, so its outcome becomes 'retried', with the id of the
-- new task. ARGV: letter, old task, new task, device, version (rounds only); the new task's
-- trigger.
local a = cmsgpack.unpack(ARGV[1])
guard()
if not redis.call('XRANGE', key.dead, a.letter, a.letter)[1] then return {'gone', ''} end
if redis.call('HGET', key.run, 'state') ~= 'running' then return {'finished', ''} end
if redis.call('HEXISTS', key.open, a.before) == 1 then return {'open', a.before} end
local attempt, outcome, reason = ended_as(a.before)
if outcome == 'retried' then return {'retried', attempt} end
if outcome and outcome ~= 'dead' then return {'ended', outcome} end
local oldest = redis.call('ZRANGE', key.ended, 0, 0)[1]
if not outcome and redis.call('ZCARD', key.ended) >= ENDED_KEPT and a.before < oldest then
  return {'forgotten', ''}
end
if a.version and tonumber(redis.call('HGET', key.head, 'version')) ~= a.version then return {'round', ''} end
for _, trigger in ipairs(redis.call('HVALS', key.open)) do -- a device has one task at a time
  local busy = cmsgpack.unpack(trigger)
  if busy.device == a.device then return {'busy', busy.task} end
end
for held in string.gmatch(redis.call('HGET', key.head, 'held') or '', '%d+') do
  if tonumber(held) == a.device then return {'held', ''} end
end
if outcome then forget(a.before, attempt, outcome, reason) end
remember(a.before, a.task, 'retried', reason)
redis.call('HSET', key.open, a.task, ARGV[2])
redis.call('XADD', key.triggers, '*', 'm', ARGV[2])
note_task(a.task)
count('issued')
redis.call('XDEL', key.dead, a.letter)
return {'sent', ''}
