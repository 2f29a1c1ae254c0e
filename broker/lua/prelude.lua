-- What is passed to Redis with every task is text: it prints each number as a float, which takes as
-- long as a short command.
local EVENTS_KEPT, VERSIONS_TOLD, CHANGES_KEPT = '10000', '10000', '10000'
local ENDED_KEPT, LINEAGE_KEPT, DEVICES_NAMED = 20000, 4096, 100
local NOTE_HOLDS_MS = 5000
local FIRST_REST_S, LONGEST_REST_S = 2, 300
local SITE_TOLD = 100 -- events per second and site, of kinds that it can cause without limit

-- Fails if Redis is out of memory, before anything is done.
local function guard()
  redis.call('HINCRBY', key.counts, 'issued', '0')
end

-- The opposite: later writes succeed even out of memory, as Redis checks only before the first
-- write. For a few bytes that must be written: without a leader nothing would be freed.
local function room()
  redis.call('HDEL', key.tokens, '')
end

local function count(what)
  redis.call('HINCRBY', key.counts, what, '1')
end

local function tell(event)
  redis.call('XADD', key.events, 'MAXLEN', '~', EVENTS_KEPT, '*', 'm', cmsgpack.pack(event))
end

-- Names a task that was opened or has ended in the log of changes, for who follows `open`.
local function note_task(task)
  redis.call('XADD', key.changes, 'MAXLEN', '~', CHANGES_KEPT, '*', 't', task)
end

-- The same for devices that got or lost an owner; if they are many, the log says '*' for all.
local function note_devices(devices)
  if #devices == 0 then return end
  local named = #devices > DEVICES_NAMED and '*' or table.concat(devices, ' ')
  redis.call('XADD', key.changes, 'MAXLEN', '~', CHANGES_KEPT, '*', 'd', named)
end

local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

-- Notes the digest of a trainer's list, until `till_ms`, and only for two heartbeats and a half: each
-- renews the note. So a trainer whose heartbeats an earlier release doesn't read sends its list
-- before it counts as silent.
local function note_list(digest, till_ms)
  local left_ms = math.min(NOTE_HOLDS_MS, till_ms - now_ms())
  if left_ms > 0 then
    redis.call('SET', key.owned, string.format('%.0f %s', till_ms, digest), 'PX', left_ms)
  else
    redis.call('UNLINK', key.owned)
  end
end

-- Acknowledges and deletes an entry; false if that was done before.
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

-- Remembers how a task ended; only the newest ended tasks are kept.
local function remember(task, attempt, outcome, reason)
  redis.call('ZADD', key.ended, '0', table.concat({task, attempt, outcome, reason or ''}, '|'))
  local over = redis.call('ZCARD', key.ended) - ENDED_KEPT
  if over > 0 then redis.call('ZREMRANGEBYRANK', key.ended, 0, over - 1) end
end

-- Notes that a device's task failed, and until when the device rests: after the second failure in a
-- row, and then for twice as long each time (`rest_after` in coordinator/cooldowns.py says the same).
local function note_failure(device, reason)
  local n = tonumber(string.match(redis.call('HGET', key.failing, device) or '', '^%d+') or 0) + 1
  local rest_s = n < 2 and 0 or math.min(FIRST_REST_S * 2 ^ (n - 2), LONGEST_REST_S)
  local till_ms = now_ms() + 1000 * rest_s
  redis.call('HSET', key.failing, device, string.format('%d %.0f %s', n, till_ms, reason))
  note_devices({device})
end

-- Notes that a device works.
local function note_success(device)
  if redis.call('HDEL', key.failing, device) == 1 then note_devices({device}) end
end

-- Ends an open task: 1 if it was open, 0 if it had ended before. `blames`: whether the device failed;
-- nil: its reason says.
local function end_task(task, attempt, outcome, reason, event, blames)
  local used = outcome == 'applied' or outcome == 'buffered'
  local trigger = not used and redis.call('HGET', key.open, task)
  if redis.call('HDEL', key.open, task) == 0 then return 0 end
  if used then
    if event.device then note_success(event.device) end
  elseif trigger and trigger ~= '' then
    local about = cmsgpack.unpack(trigger)
    -- Only these name the site, for observers judge a run by them.
    if outcome ~= 'given_up' then event.site = about.site end
    if blames == nil then
      blames = not string.find(reasons.OF_THE_RUN, '|' .. (reason or '') .. '|', 1, true)
    end
    if blames then note_failure(about.device, reason or outcome) end
  end
  redis.call('HDEL', key.admitted, task)
  note_task(task)
  remember(task, attempt, outcome, reason)
  count(outcome)
  if reason then count(outcome .. ':' .. reason) end
  event.what, event.task, event.outcome, event.reason = 'outcome', task, outcome, reason
  tell(event)
  return 1
end

-- Gives up an open task unless an answer to it was admitted, and so is queued. Returns 1 or 0.
local function give_up(task, why, event, blames)
  if redis.call('HEXISTS', key.admitted, task) == 1 then return 0 end
  return end_task(task, '', 'given_up', why, event, blames)
end

-- How a task ended: attempt, outcome and reason, or nil. The set is ordered by id: an index.
local function ended_as(task)
  local found = redis.call('ZRANGEBYLEX', key.ended, '[' .. task .. '|', '[' .. task .. '}', 'LIMIT', 0, 1)[1]
  if not found then return nil end
  return string.match(found, '^[^|]*|([^|]*)|([^|]*)|(.*)$')
end

-- Forgets how a task ended.
local function forget(task, attempt, outcome, reason)
  redis.call('ZREM', key.ended, table.concat({task, attempt, outcome, reason}, '|'))
end

-- Unpacks counts of tasks by outcome and reason, and adds up the tasks.
local function ends_of(packed)
  local counts, n = packed and cmsgpack.unpack(packed) or {}, 0
  for name, ended in pairs(counts) do
    if not string.find(name, ':', 1, true) then n = n + ended end
  end
  return counts, n
end

-- Ends a task as the journal says. In a Redis that fell back the task was open again, and a
-- coordinator may have ended it differently since: that outcome is taken back, so that the task
-- counts once. Returns 'counted', 'known' (counted before) or 'unknown' (not counted: Redis doesn't
-- know the task).
local function end_as_journalled(task, attempt, outcome, reason, event)
  local why_ended = reason ~= '' and reason or nil
  if end_task(task, attempt, outcome, why_ended, event) == 1 then return 'counted' end
  local by, was, why = ended_as(task)
  if not by then return 'unknown' end
  if was == outcome and why == reason then return 'known' end
  if reason == reasons.LOST_WITH_REDIS then return 'known' end -- the journal lost the real end: Redis knows better
  forget(task, by, was, why)
  if was == 'retried' then was = 'dead' end -- retried tasks are counted as dead
  redis.call('HINCRBY', key.counts, was, -1)
  if why ~= '' then redis.call('HINCRBY', key.counts, was .. ':' .. why, -1) end
  redis.call('HSET', key.open, task, '')
  event.text = 'not ' .. was .. ', as it was told after Redis fell back'
  end_task(task, attempt, outcome, why_ended, event)
  return 'counted'
end

-- Charges `n` (default 1) to a limit of `most` per second; false if it was already used up.
local function within(what, most, n)
  local second = redis.call('TIME')[1]
  if redis.call('HGET', key.rates, '') ~= second then -- a new second: start again
    redis.call('DEL', key.rates)
    redis.call('HSET', key.rates, '', second)
  end
  return redis.call('HINCRBY', key.rates, what, n or 1) - (n or 1) < most
end

-- Sends an event that a site can cause at will, within the site's rate.
local function tell_of(site, event)
  if within('told ' .. site, SITE_TOLD) then tell(event) end
end

-- Counts a site's message that ends no task, and sends an event about it.
local function stray(site, task, why, event)
  count('stray:' .. why)
  event.what, event.task, event.reason = 'stray', task, why
  tell_of(site, event)
end

-- Adds fields to a packed message, under a new map header. The message isn't unpacked, because Lua
-- has no 64-bit integers.
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

-- The site of a trainer, from its name: the pool's trainers have no prefix.
local function site_of(member)
  return string.match(member, '^(.*)/') or 'pool'
end

-- The task stream of a device's owner, or else the pool's.
local function stream_of(owner)
  if not owner then return key.tasks end
  return key.tasks .. ':' .. (string.find(owner, '/', 1, true) and owner or 'pool/' .. owner)
end

-- For a device and its owner: the task stream, the keys of the strategy's state of the device and
-- of its copy for the owner's site, and the site.
local function places(device, owner)
  local site = owner and site_of(owner) or 'pool'
  return stream_of(owner), prefix .. 'device:' .. device, prefix .. 'control:' .. site .. '/' .. device, site
end

-- Sends a task to the trainers that serve its device, with a copy of the strategy's state of the
-- device. The trigger in `open` is extended with the site, whose answer alone counts, and with the
-- newest version now: an untrusted site's answer can't be fresher than that.
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

-- Whether one stream id is less than or equal to another.
local function is_up_to(id, other)
  local ms, n = string.match(id, '(%d+)-(%d+)')
  local other_ms, other_n = string.match(other, '(%d+)-(%d+)')
  if ms ~= other_ms then return tonumber(ms) < tonumber(other_ms) end
  return tonumber(n) <= tonumber(other_n)
end

-- The task in a stream's entry, or nil if there is none: entries may be foreign.
local function task_of(entry)
  local ok, task = pcall(cmsgpack.unpack, entry[2][2])
  local readable = ok and type(task) == 'table' and type(task.task) == 'string'
  return readable and type(task.device) == 'number' and task or nil
end

-- Where these tasks were sent: the stream and entry of each.
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

-- Gives up the unanswered tasks and deletes their entries: a trainer at work on one loses its lease
-- and stops. A device whose task no trainer took did not fail.
local function withdraw(tasks, sent, group, why, event)
  for _, id in ipairs(tasks) do
    local stream, entry = unpack(sent[id] or {})
    local taken = stream and redis.pcall('XPENDING', stream, group, entry, entry, 1)[1]
    local blames = nil
    if not taken then blames = false end
    if give_up(id, why, cmsgpack.unpack(event), blames) == 1 and sent[id] then
      redis.pcall('XACK', sent[id][1], group, sent[id][2])
      redis.call('XDEL', sent[id][1], sent[id][2])
    end
  end
end

-- How many devices can work at the same time: the live trainers, counting for a gateway its devices.
local function workers()
  local n = redis.call('ZCOUNT', key.alive, '(0', '+inf')
  for _, devices in ipairs(redis.call('HVALS', key.concurrent)) do
    n = n - 1 + (tonumber(devices) or 1)
  end
  return n
end

-- Whether there is a live trainer that owns nothing, and so serves the unowned devices.
local function pool_serves()
  for _, name in ipairs(redis.call('SMEMBERS', key.pool)) do
    if tonumber(redis.call('ZSCORE', key.alive, name) or 0) > 0 then return true end
  end
  return false
end

-- Whether a version's blob is there, as the version says it is.
local function is_written(version, blob)
  if version.encoded then return redis.call('HGET', blob, 'encoded') == version.encoded end
  return redis.call('HGET', blob, 'size') == version.size
end

-- Adds a version to the lineage, under the digest by which devices know it. The digest of its float32
-- model is kept beside that if it is another.
local function know(version)
  local n, own = version.version, 'f32:'
  redis.call('HSET', key.lineage, n, version.given or version.digest)
  if version.given and version.given ~= version.digest then
    redis.call('HSET', key.lineage, own .. n, version.digest)
  else
    redis.call('HDEL', key.lineage, own .. n)
  end
  redis.call('HDEL', key.lineage, n - LINEAGE_KEPT, own .. n - LINEAGE_KEPT)
end

-- Keeps a model that is published, and says in it how many chunks it has, for readers that know only
-- its name.
local function keep(blob, chunks)
  redis.call('PERSIST', blob)
  if chunks then redis.call('HSET', blob, 'chunks', chunks) end
end

-- Why an operator's command about these devices can't be obeyed, and a detail; nil if it can.
local function why_not(devices)
  local state, n = unpack(redis.call('HMGET', key.run, 'state', 'devices'))
  if not state then return 'none', '' end
  if state ~= 'running' then return 'finished', '' end
  for _, device in ipairs(devices) do
    if device >= tonumber(n) then return 'unknown', tostring(device) end
  end
end

-- How many control entries about quarantines these packed ones have taken, or 0.
local function quarantines_taken(packed)
  return packed and cmsgpack.unpack(packed).taken or 0
end

-- Replaces who is quarantined, unless Redis knows of later changes: then this request is late, or the
-- journal lost its tail and is catching up.
local function quarantine(packed)
  if quarantines_taken(packed) >= quarantines_taken(redis.call('HGET', key.head, 'quarantines')) then
    redis.call('HSET', key.head, 'quarantines', packed)
  end
end

-- Whether a device is in quarantine.
local function is_quarantined(device)
  local packed = redis.call('HGET', key.head, 'quarantines')
  for _, group in ipairs(packed and cmsgpack.unpack(packed).groups or {}) do
    for _, one in ipairs(group.devices) do
      if one == device then return true end
    end
  end
  return false
end

-- Whether a device has no privacy budget left, by the bits that the updater publishes.
local function is_spent(device)
  local packed = redis.call('HGET', key.head, 'privacy')
  local digits, at = packed and cmsgpack.unpack(packed).spent or '', math.floor(device / 4) + 1
  return bit.band(tonumber(string.sub(digits, at, at), 16) or 0, bit.lshift(1, device % 4)) ~= 0
end

-- Checks a role's token: nil if it is current, 'fenced' if another process holds the role, 'lost'
-- if Redis lost it. The nonce identifies the holder: a process that has just reacquired its own
-- lease doesn't fence itself.
local function fenced(token, role)
  local now = redis.call('HGET', key.tokens, role)
  if now == token then return nil end
  local same = now and string.match(now, ':.*') == string.match(token, ':.*')
  return now and not same and 'fenced' or 'lost'
end

-- Keeps the model of a measured version if its value is strictly better than the best version's, or
-- of another metric.
local function keep_if_best(packed)
  local a = cmsgpack.unpack(packed)
  local metric, value = unpack(redis.call('HMGET', key.best, 'metric', 'value'))
  if metric == a.metric then
    local gain = tonumber(a.value) - tonumber(value)
    if (a.goal == 'min' and -gain or gain) <= 0 then return end
  end
  redis.call(
    'HSET', key.best, 'metric', a.metric, 'value', a.value, 'version', a.version, 'digest', a.digest, 'blob', a.blob)
  -- Redis was full meanwhile, and the updater deleted the model.
  if not redis.call('ZSCORE', key.kept, a.blob) then redis.call('HDEL', key.best, 'blob') end
end
