-- keys: tokens run head blob models kept lineage open admitted ended events counts changes failing
-- Creates the run with its first version, or publishes its newest version again because Redis lost
-- it. If Redis was emptied, or is older than the journal, the run's counts are restored too, so
-- that they and the scheduler's draws continue. `a.ends`: in an older Redis, the journal's ends of
-- tasks that are open there or have ended differently since.
local a = cmsgpack.unpack(ARGV[1])
local foreign = fenced(a.token, 'updater')
if foreign then return foreign end
if a.look and redis.call('HGET', key.tokens, 'look') ~= a.look then return 'moved' end
local forgot = a.ends or redis.call('EXISTS', key.run) == 0
guard()
if not is_written(a, key.blob) then return 'unwritten' end
keep(key.blob, a.chunks)
local had, told = ends_of(redis.call('HGET', key.head, 'journalled')) -- included in Redis's counts
local journalled, ends = ends_of(a.journalled)
if forgot then
  local function add(name) had[name] = (had[name] or 0) + 1 end
  for _, ended in ipairs(a.ends or {}) do
    local _, _, outcome, reason = unpack(ended)
    if end_as_journalled(unpack(ended)) == 'counted' then
      add(outcome)
      if reason ~= '' then add(outcome .. ':' .. reason) end
    end
  end
  local counts = pairs_of(redis.call('HGETALL', key.counts))
  if tonumber(counts.issued) == 0 then -- Redis was emptied: restore all known counts
    counts = a.counts
  elseif ends >= told then -- else the journal lost its tail, which is counted here
    -- Keep Redis's counts of ends by coordinators: those it forgot may concern the same tasks.
    for name, n in pairs(journalled) do counts[name] = (counts[name] or 0) + n - (had[name] or 0) end
  end
  -- The rest was issued, but has neither ended nor is open here: it will never be answered.
  local lost = 'given_up:' .. reasons.LOST_WITH_REDIS
  local before = counts[lost] or 0
  local known = redis.call('HLEN', key.open) - before
  for _, outcome in ipairs(a.outcomes) do known = known + (counts[outcome] or 0) end
  counts.issued = math.max(counts.issued or 0, a.counts.issued or 0, known)
  if counts.issued - known ~= tonumber(before) then
    counts[lost] = counts.issued - known
    counts.given_up = (counts.given_up or 0) + counts[lost] - before
  end
  for name, n in pairs(counts) do redis.call('HSET', key.counts, name, n) end
end
local state, why, finished, versions = unpack(
  redis.call('HMGET', key.run, 'state', 'why', 'finished', 'versions'))
local extended = state == 'finished' and tonumber(versions) < a.versions
if extended then redis.call('HDEL', key.run, 'why', 'finished') end
redis.call('HSET', key.run, unpack(a.run))
if state == 'finished' and not extended then -- the run was finished meanwhile, and stays so
  redis.call('HSET', key.run, 'state', state, 'why', why, 'finished', finished)
end
redis.call('HSET', key.head, unpack(a.head))
if ends >= told then redis.call('HSET', key.head, 'journalled', a.journalled) end
if a.quarantines then quarantine(a.quarantines) end
know(a)
redis.call('ZADD', key.kept, a.version, a.blob)
redis.call('XADD', key.models, 'MAXLEN', '~', VERSIONS_TOLD, '*', 'm', ARGV[2])
if a.look then redis.call('HDEL', key.tokens, 'look') end
return {'created', redis.call('HGET', key.run, 'state'), redis.call('HGETALL', key.counts)}
