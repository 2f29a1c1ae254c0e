local EVENTS_KEPT, VERSIONS_TOLD, ENDED_KEPT = 10000, 10000, 20000
local LINEAGE_KEPT = 4096
local SITE_TOLD = 100 -- a second and site, of what it can cause without end
local LOST = 'lost with Redis'

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

-- Takes an entry out of its stream: whether it was there for us, or was done with before.
local function take(stream, group, entry)
  if redis.call('XACK', stream, group, entry) == 0 then return false end
  redis.call('XDEL', stream, entry)
  return true
end

local function pairs_of(list)
  local map = {}
  for i = 1, #list, 2 do map[list[i]] = list[i + 1] end
  return map
end

-- Remembers how a task ended: of the newest.
local function remember(task, attempt, outcome, reason)
  redis.call('ZADD', key.ended, 0, table.concat({task, attempt, outcome, reason or ''}, '|'))
  local over = redis.call('ZCARD', key.ended) - ENDED_KEPT
  if over > 0 then redis.call('ZREMRANGEBYRANK', key.ended, 0, over - 1) end
end

-- Ends an open task: 1 if it was open, 0 if it had ended before.
local function end_task(task, attempt, outcome, reason, event)
  -- Whose it was is told of what went wrong alone, which observers judge a run by.
  local wrong = (outcome == 'refused' or outcome == 'dead') and redis.call('HGET', key.open, task)
  if redis.call('HDEL', key.open, task) == 0 then return 0 end
  if wrong and wrong ~= '' then event.site = cmsgpack.unpack(wrong).site end
  redis.call('HDEL', key.admitted, task)
  remember(task, attempt, outcome, reason)
  count(outcome)
  if reason then count(outcome .. ':' .. reason) end
  event.what, event.task, event.outcome, event.reason = 'outcome', task, outcome, reason
  tell(event)
  return 1
end

-- Gives an open task up, unless an answer to it was admitted: that is in the queue, and counts. 1 or 0.
local function give_up(task, why, event)
  if redis.call('HEXISTS', key.admitted, task) == 1 then return 0 end
  return end_task(task, '', 'given_up', why, event)
end

-- How a task ended: attempt, outcome and reason, or nil. Ids are ordered, so the set is an index.
local function ended_as(task)
  local found = redis.call('ZRANGEBYLEX', key.ended, '[' .. task .. '|', '[' .. task .. '}', 'LIMIT', 0, 1)[1]
  if not found then return nil end
  return string.match(found, '^[^|]*|([^|]*)|([^|]*)|(.*)$')
end

-- Forgets it again.
local function forget(task, attempt, outcome, reason)
  redis.call('ZREM', key.ended, table.concat({task, attempt, outcome, reason}, '|'))
end

-- Counts of tasks by outcome and reason as they travel, and how many tasks that are.
local function ends_of(packed)
  local counts, n = packed and cmsgpack.unpack(packed) or {}, 0
  for name, ended in pairs(counts) do
    if not string.find(name, ':', 1, true) then n = n + ended end
  end
  return counts, n
end

-- Ends a task as the journal has it. A Redis that fell back had it open again, and a coordinator may have
-- ended it otherwise since: that outcome is taken back, so that a task is counted as one. What it came to:
-- 'counted', 'known' (it was counted before) or 'unknown' (and not counted: there is no such task here).
local function end_as_journalled(task, attempt, outcome, reason, event)
  local why_ended = reason ~= '' and reason or nil
  if end_task(task, attempt, outcome, why_ended, event) == 1 then return 'counted' end
  local by, was, why = ended_as(task)
  if not by then return 'unknown' end
  if was == outcome and why == reason then return 'known' end
  if reason == LOST then return 'known' end -- of an end that the journal lost: Redis knows better
  forget(task, by, was, why)
  if was == 'retried' then was = 'dead' end -- as which it is counted
  redis.call('HINCRBY', key.counts, was, -1)
  if why ~= '' then redis.call('HINCRBY', key.counts, was .. ':' .. why, -1) end
  redis.call('HSET', key.open, task, '')
  event.text = 'not ' .. was .. ', as it was told after Redis fell back'
  end_task(task, attempt, outcome, why_ended, event)
  return 'counted'
end

-- Whether a site has not used up in this second what it may do (`most`), before it does this (`n`, or 1).
local function within(what, most, n)
  local second = redis.call('TIME')[1]
  if redis.call('HGET', key.rates, '') ~= second then -- what was done before counts no more
    redis.call('DEL', key.rates)
    redis.call('HSET', key.rates, '', second)
  end
  return redis.call('HINCRBY', key.rates, what, n or 1) - (n or 1) < most
end

-- Tells what a site can cause as often as it likes: within its rate.
local function tell_of(site, event)
  if within('told ' .. site, SITE_TOLD) then tell(event) end
end

-- What a site said that ends no task: counted, and told.
local function stray(site, task, why, event)
  count('stray:' .. why)
  event.what, event.task, event.reason = 'stray', task, why
  tell_of(site, event)
end

-- A message with more fields, behind a longer map's head. It is not unpacked for that: Lua has no
-- integers of 64 bits.
local function with(message, more)
  local n, from = string.byte(message) - 0x80, 2
  if n > 15 then n, from = 256 * string.byte(message, 2) + string.byte(message, 3), 4 end
  local parts = {'', string.sub(message, from)}
  for name, value in pairs(more) do
    n = n + 1
    parts[#parts + 1] = cmsgpack.pack(name) .. cmsgpack.pack(value)
  end
  parts[1] = string.char(0xde, math.floor(n / 256), n % 256)
  return table.concat(parts)
end

-- The site of a trainer by what it is called: those of the pool have none in front.
local function site_of(member)
  return string.match(member, '^(.*)/') or 'pool'
end

-- The stream of those who serve a device: its owner's, or the pool's.
local function stream_of(owner)
  if not owner then return key.tasks end
  return key.tasks .. ':' .. (string.find(owner, '/', 1, true) and owner or 'pool/' .. owner)
end

-- Of a device under an owner: its stream, what a strategy remembers of it and that copied for the site
-- that is to read it, and the site.
local function places(device, owner)
  local site = owner and site_of(owner) or 'pool'
  return stream_of(owner), prefix .. 'device:' .. device, prefix .. 'control:' .. site .. '/' .. device, site
end

-- Sends a task to whoever serves its device, with what a strategy remembers of that. In `open` stands
-- behind the trigger whose it is, and what was the newest version then: only their answer counts, and
-- they can't be fresher than that.
local function send(task, device, owner, message, trigger, newest)
  local stream, memory, copy, site = places(device, owner)
  local digest = redis.call('HGET', memory, 'digest')
  if digest and digest ~= redis.call('HGET', copy, 'digest') then
    redis.call('COPY', memory, copy, 'REPLACE')
  end
  local entry = redis.call('XADD', stream, '*', 'm', message)
  redis.call('HSET', key.open, task, with(trigger, {
    site = site, owner = owner or false, entry = entry, handed = newest,
  }))
end

-- Whether one id of a stream comes before another, or is it.
local function is_up_to(id, other)
  local ms, n = string.match(id, '(%d+)-(%d+)')
  local other_ms, other_n = string.match(other, '(%d+)-(%d+)')
  if ms ~= other_ms then return tonumber(ms) < tonumber(other_ms) end
  return tonumber(n) <= tonumber(other_n)
end

-- The task in an entry of a stream; nil for what is none, whoever wrote it.
local function task_of(entry)
  local ok, task = pcall(cmsgpack.unpack, entry[2][2])
  local readable = ok and type(task) == 'table' and type(task.task) == 'string'
  return readable and type(task.device) == 'number' and task or nil
end

-- Where these tasks were sent: each one's stream and entry.
local function sent_to(tasks)
  local sent = {}
  for _, id in ipairs(tasks) do
    local trigger = redis.call('HGET', key.open, id)
    local about = trigger and cmsgpack.unpack(trigger) or {}
    if about.entry then sent[id] = {stream_of(about.owner), about.entry} end
  end
  for _, place in pairs(sent) do redis.call('EXISTS', place[1]) end -- as for undeclared keys
  return sent
end

-- Gives tasks up that were not answered, and takes them away from whoever has them or may take them: a
-- trainer that is at work on one loses its lease, and stops.
local function withdraw(tasks, sent, group, why, event)
  for _, id in ipairs(tasks) do
    if give_up(id, why, cmsgpack.unpack(event)) == 1 and sent[id] then
      redis.pcall('XACK', sent[id][1], group, sent[id][2])
      redis.call('XDEL', sent[id][1], sent[id][2])
    end
  end
end

-- Whether a trainer is there that owns nothing, and so serves the devices that nobody owns.
local function pool_serves()
  for _, name in ipairs(redis.call('SMEMBERS', key.pool)) do
    if tonumber(redis.call('ZSCORE', key.alive, name) or 0) > 0 then return true end
  end
  return false
end

-- Whether a role's token is another's ('fenced'), or gone with all of Redis's data ('lost'). The nonce
-- says whose it is: a process that has just taken its own lease again is not fenced by itself.
local function fenced(token, role)
  local now = redis.call('HGET', key.tokens, role)
  if now == token then return nil end
  local same = now and string.match(now, ':.*') == string.match(token, ':.*')
  return now and not same and 'fenced' or 'lost'
end
