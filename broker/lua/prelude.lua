local EVENTS_KEPT, VERSIONS_TOLD, ENDED_KEPT = 10000, 10000, 20000
local LINEAGE_KEPT, DEAD_KEPT = 4096, 1000

-- Fails here, before anything was done, if Redis is out of memory.
local function guard()
  redis.call('HINCRBY', key.counts, 'issued', 0)
end

-- The opposite: what follows is done even without memory. Redis asks only before the first write. For
-- a few bytes that must not fail: without a leader nobody frees anything.
local function room()
  redis.call('HDEL', key.tokens, '')
end

local function count(what)
  redis.call('HINCRBY', key.counts, what, 1)
end

local function tell(event)
  redis.call('XADD', key.events, 'MAXLEN', '~', EVENTS_KEPT, '*', 'm', cmsgpack.pack(event))
end

local function pairs_of(list)
  local map = {}
  for i = 1, #list, 2 do map[list[i]] = list[i + 1] end
  return map
end

-- Remembers how a task ended: of the newest.
local function remember(task, attempt, outcome)
  redis.call('ZADD', key.ended, 0, task .. '|' .. attempt .. '|' .. outcome)
  local over = redis.call('ZCARD', key.ended) - ENDED_KEPT
  if over > 0 then redis.call('ZREMRANGEBYRANK', key.ended, 0, over - 1) end
end

-- Ends an open task: 1 if it was open, 0 if it had ended before.
local function end_task(task, attempt, outcome, reason, event)
  if redis.call('HDEL', key.open, task) == 0 then return 0 end
  redis.call('HDEL', key.admitted, task)
  remember(task, attempt, outcome)
  count(outcome)
  if reason then count(outcome .. ':' .. reason) end
  event.what, event.task, event.outcome, event.reason = 'outcome', task, outcome, reason
  tell(event)
  return 1
end

-- How a task ended: attempt and outcome, or nil. Ids are ordered, so the set is an index.
local function ended_as(task)
  local found = redis.call('ZRANGEBYLEX', key.ended, '[' .. task .. '|', '[' .. task .. '}', 'LIMIT', 0, 1)[1]
  if not found then return nil end
  return string.match(found, '^[^|]*|([^|]*)|(.*)$')
end

-- The task in an entry of a stream; nil for what is none, whoever wrote it.
local function task_of(entry)
  local ok, task = pcall(cmsgpack.unpack, entry[2][2])
  local readable = ok and type(task) == 'table' and type(task.task) == 'string'
  return readable and type(task.device) == 'number' and task or nil
end

-- The streams that may hold these tasks: the pool's, and those of their devices' owners.
local function streams_of(tasks)
  local streams = {[key.tasks] = true}
  for _, id in ipairs(tasks) do
    local trigger = redis.call('HGET', key.open, id)
    local owner = trigger and redis.call('HGET', key.owners, cmsgpack.unpack(trigger).device)
    if owner then streams[key.tasks .. ':' .. owner] = true end
  end
  for stream in pairs(streams) do redis.call('EXISTS', stream) end -- as for undeclared keys
  return streams
end

-- Gives tasks up that were not answered, and takes them away from whoever has them or may take them: a
-- trainer that is at work on one loses its lease, and stops.
local function withdraw(tasks, streams, group, why, event)
  local gone = {}
  for _, id in ipairs(tasks) do
    -- an admitted answer is in the queue: it counts
    if redis.call('HEXISTS', key.admitted, id) == 0 then
      gone[id] = end_task(id, '', 'given_up', why, cmsgpack.unpack(event)) == 1
    end
  end
  for stream in pairs(streams) do
    for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do
      local task = task_of(entry)
      if task and gone[task.task] then
        redis.pcall('XACK', stream, group, entry[1])
        redis.call('XDEL', stream, entry[1])
      end
    end
  end
end

-- The devices that a trainer on the register says are its own.
local function devices_of(name)
  local ok, about = pcall(cmsgpack.unpack, redis.call('HGET', key.trainers, name) or '')
  local said = ok and type(about) == 'table' and type(about.owns) == 'table' and about.owns or {}
  local devices = {}
  for _, device in ipairs(said) do
    if type(device) == 'number' and device == device then devices[#devices + 1] = device end -- no NaN
  end
  return devices
end

local function bury(dead)
  local over = redis.call('XLEN', key.dead) + 1 - DEAD_KEPT
  if over > 0 then redis.call('HINCRBY', key.counts, 'dead_letters_lost', over) end
  redis.call('XADD', key.dead, 'MAXLEN', DEAD_KEPT, '*', 'm', dead)
  count('dead_letters')
end

-- Whether a role's token is another's ('fenced'), or gone with all of Redis's data ('lost'). The nonce
-- says whose it is: a process that has just taken its own lease again is not fenced by itself.
local function fenced(token, role)
  local now = redis.call('HGET', key.tokens, role)
  if now == token then return nil end
  local same = now and string.match(now, ':.*') == string.match(token, ':.*')
  return now and not same and 'fenced' or 'lost'
end
