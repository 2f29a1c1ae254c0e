-- keys: stream open admitted ended events counts rates changes failing
-- undeclared: run head lineage queue pool
-- Admits an answer by its metadata: a task of this site, first answer, device, layout, size, base,
-- current staleness. ARGV: the answer, the entry for the queue, the event's fields. rest: the
-- blob's key as its site wrote it, and its key once admitted, where no site can change what the
-- updater will read. For untrusted sites, staleness counts from the newest version at the time the
-- task was handed out, and steps count as many as the task asked for; if it asked for epochs or
-- seconds, as claimed, from one for each epoch to `most_steps`.
local a = cmsgpack.unpack(ARGV[1])
local blob, admitted = KEYS[first_rest], KEYS[first_rest + 1]
guard()
if not take(key.stream, a.group, a.entry) then return {'repeated', ''} end

local function event()
  return cmsgpack.unpack(ARGV[3]) -- only here: most answers are admitted, without one
end

local function astray(why)
  stray(a.site, a.task, why, event())
  redis.call('UNLINK', blob)
  return {'stray', why}
end

-- The same answer again: a blob now under the site's key is not the one that was admitted.
local function again()
  redis.call('UNLINK', blob)
  return {'admitted', ''}
end

local staleness -- of an update from a version that is known
local function refused(why)
  local told = event()
  told.staleness = staleness
  end_task(a.task, a.attempt, 'refused', why, told)
  redis.call('UNLINK', blob)
  return {'refused', why}
end

-- Why the blob's size is wrong, or nil. Checks only lengths, so an oversized blob need not be read
-- to be refused; the updater reads admitted blobs without checking again. All chunks but the last
-- are as long as the first, which is within the limits, and there are as many as the site says: so
-- their number is bounded, and whoever reads one knows how much memory that takes.
local function unlike(size)
  local digits = redis.pcall('HSTRLEN', blob, 'size')
  if type(digits) == 'table' or digits == 0 then return reasons.BLOB_MISSING end
  if digits ~= #size or redis.call('HGET', blob, 'size') ~= size then return reasons.SIZE end
  if a.chunks > math.ceil(size / a.shortest) then return reasons.SIZE end
  if redis.call('HLEN', blob) > a.chunks + 1 then return reasons.SIZE end
  local whole, total = redis.call('HSTRLEN', blob, '0'), 0
  for n = 0, a.chunks - 1 do
    local length = n == 0 and whole or redis.call('HSTRLEN', blob, n)
    if length == 0 then return reasons.BLOB_MISSING end
    if length ~= math.min(whole, size - total) then return reasons.SIZE end
    total = total + length
  end
  if total ~= tonumber(size) or whole > a.longest then return reasons.SIZE end
  if a.chunks > 1 and whole < a.shortest then return reasons.SIZE end
end

local trigger = redis.call('HGET', key.open, a.task)
if not trigger then
  local attempt, outcome = ended_as(a.task)
  if not attempt then return astray(reasons.UNKNOWN_TASK) end
  if attempt == a.attempt then return again() end
  return astray(outcome == 'given_up' and reasons.LATE or reasons.ANSWERED_TWICE)
end
local task = cmsgpack.unpack(trigger)
-- Without a site the task was never handed out: Redis fell back to before that. Then only trusted
-- sites may answer it.
if task.site ~= a.site and (task.site or not a.trusted) then return astray(reasons.ANOTHER_SITES_TASK) end
local first = redis.call('HGET', key.admitted, a.task)
if first == a.attempt then return again() end
if first then return astray(reasons.ANSWERED_TWICE) end

if task.device ~= a.device then return refused(reasons.ANOTHER_DEVICE) end
local state, layout, size, max_staleness, policy =
  unpack(redis.call('HMGET', key.run, 'state', 'layout', 'size', 'max_staleness', 'policy'))
local head = tonumber(redis.call('HGET', key.head, 'version') or '-1')

local function is_too_stale(since)
  return max_staleness and since and head - since > tonumber(max_staleness)
end

-- Whether a task can't be finished for this reason, whatever its device does.
local function is_so(why)
  return why == reasons.RUN_FINISHED and state ~= 'running'
    or why == reasons.ROUND_OVER and task.version and task.version ~= head
    or why == reasons.BECAME_STALE and is_too_stale(task.handed)
    or why == reasons.DROPPED_OUT and a.trusted -- our own trainers simulate it
end

if a.give_up then
  -- The device failed, unless the reason is so, or its trainer fails and there are others.
  local excused = is_so(a.give_up) or a.trainer_fails and redis.call('SCARD', key.pool) > 1
  end_task(a.task, a.attempt, 'given_up', a.give_up, event(), not excused)
  return {'given_up', a.give_up}
end
if state ~= 'running' then
  end_task(a.task, a.attempt, 'given_up', reasons.RUN_FINISHED, event())
  redis.call('UNLINK', blob)
  return {'given_up', reasons.RUN_FINISHED}
end
local since = a.trusted and a.tau or task.handed
staleness = a.tau <= head and head - since or nil
if a.layout ~= layout then return refused(reasons.LAYOUT) end
if a.size > a.size_limit then return refused(reasons.TOO_LARGE) end
if a.unfit ~= '' then return refused(a.unfit) end
-- In a private run, an update that is not masked is refused and deleted before anybody reads it.
local masked = policy and policy ~= '' and 'mask' .. cjson.decode(policy).word_bits
if masked and a.format ~= masked or not masked and string.sub(a.format, 1, 4) == 'mask' then
  return refused(reasons.WIRE_FORMAT)
end
if masked and not a.sealed then return refused(reasons.SEAL) end
local least, most = a.least or tonumber(size), a.most or tonumber(size)
if a.size < least or a.size > most then return refused(reasons.SIZE) end
if redis.call('HGET', key.lineage, a.tau) ~= a.base then return refused(reasons.UNKNOWN_BASE) end
if a.tau < since then return refused(reasons.UNKNOWN_BASE) end -- older than its task
if is_too_stale(since) then return refused(reasons.TOO_STALE) end
local size_text = string.format('%d', a.size)
local why = unlike(size_text)
if why then return refused(why) end
redis.call('UNLINK', admitted) -- RENAME would delete it synchronously, however large
redis.call('RENAME', blob, admitted)
redis.call('PERSIST', admitted)
redis.call('HSET', key.admitted, a.task, a.attempt)
if a.least then -- in a wire format: what it saves is shown
  count('encoded')
  redis.call('HINCRBY', key.counts, 'encoded_bytes', size_text)
end
local said = ARGV[2]
if not a.trusted then
  local steps = a.steps
  if steps > 0 then steps = task.steps or math.min(math.max(steps, task.epochs or 1), a.most_steps) end
  said = with(said, {handed = since, steps = steps})
end
redis.call('XADD', key.queue, '*', 'm', said)
return {'admitted', ''}
