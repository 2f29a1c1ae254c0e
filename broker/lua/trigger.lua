-- keys: tokens open counts changes
-- undeclared: run head owners tasks
-- Opens the scheduler's tasks while fewer than the limit are open, and hands each to the trainers that
-- serve its device: to the device's owner, or else to the pool. The n-th draw makes the n-th issued
-- task, so a repetition after a lost reply, which would issue a draw twice, is detected. ARGV: the
-- token, the limit, the draw; for each task its id, its device, the trigger and the assignment.
local token, limit, draw = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local foreign = fenced(token, 'scheduler')
if foreign then return foreign end
if redis.call('HGET', key.run, 'state') ~= 'running' then return 'idle' end
local owners = {}
for i = 4, #ARGV, 4 do
  local device = ARGV[i + 1]
  owners[i] = redis.call('HGET', key.owners, device)
  local stream, memory, copy = places(device, owners[i])
  redis.call('EXISTS', stream, memory, copy) -- fails here while a cluster migrates them
end
guard()
if tonumber(redis.call('HGET', key.counts, 'issued')) ~= draw then return 'moved' end
local newest = tonumber(redis.call('HGET', key.head, 'version') or 0)
local issued = 0
for i = 4, #ARGV, 4 do
  if redis.call('HLEN', key.open) >= limit then break end
  send(ARGV[i], ARGV[i + 1], owners[i], ARGV[i + 3], ARGV[i + 2], newest)
  note_task(ARGV[i])
  count('issued')
  issued = issued + 1
end
return issued
