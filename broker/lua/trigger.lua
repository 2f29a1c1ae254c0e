-- keys: tokens open counts changes
-- undeclared: run triggers
-- Adds the scheduler's tasks to `open` while it holds fewer than the limit. The n-th draw makes the
-- n-th issued task, so a repetition after a lost reply, which would issue a draw twice, is
-- detected.
local token, limit, draw = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local foreign = fenced(token, 'scheduler')
if foreign then return foreign end
if redis.call('HGET', key.run, 'state') ~= 'running' then return 'idle' end
guard()
if tonumber(redis.call('HGET', key.counts, 'issued')) ~= draw then return 'moved' end
local issued = 0
for i = 4, #ARGV, 2 do
  if redis.call('HLEN', key.open) >= limit then break end
  redis.call('HSET', key.open, ARGV[i], ARGV[i + 1])
  redis.call('XADD', key.triggers, '*', 'm', ARGV[i + 1])
  note_task(ARGV[i])
  count('issued')
  issued = issued + 1
end
return issued
