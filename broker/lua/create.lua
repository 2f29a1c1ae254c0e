-- keys: tokens run head blob models kept lineage open admitted ended events counts
-- The run with the version that it starts from, or its newest version again because Redis lost it. A
-- Redis that was emptied, or is older than the journal (`a.ends`: of what is open there, or was
-- ended otherwise since), gets the run's counts too, so that they and the scheduler's draws go on.
local a = cmsgpack.unpack(ARGV[1])
local foreign = fenced(a.token, 'updater')
if foreign then return foreign end
local forgot = a.ends or redis.call('EXISTS', key.run) == 0
local function counted(name) return tonumber(redis.call('HGET', key.counts, name) or '0') end
guard()
if redis.call('HGET', key.blob, 'size') ~= a.size then return 'unwritten' end
redis.call('PERSIST', key.blob)
if forgot then
  for _, ended in ipairs(a.ends or {}) do end_as_journalled(unpack(ended)) end
  for name, n in pairs(a.counts) do
    if n > counted(name) then redis.call('HSET', key.counts, name, n) end
  end
  -- What is missing now was issued, has not ended, and is not open here: nobody will answer.
  local known = redis.call('HLEN', key.open)
  for _, outcome in ipairs(a.outcomes) do known = known + counted(outcome) end
  local lost = counted('issued') - known
  if lost > 0 then
    redis.call('HINCRBY', key.counts, 'given_up', lost)
    redis.call('HINCRBY', key.counts, 'given_up:' .. LOST, lost)
  else -- what a coordinator ended after that, and is open here again, counts as one more
    redis.call('HSET', key.counts, 'issued', known)
  end
end
local state, why, finished = unpack(redis.call('HMGET', key.run, 'state', 'why', 'finished'))
redis.call('HSET', key.run, unpack(a.run))
if state == 'finished' then -- somebody ended it meanwhile: it stays ended
  redis.call('HSET', key.run, 'state', state, 'why', why, 'finished', finished)
end
redis.call('HSET', key.head, unpack(a.head))
redis.call('HSET', key.lineage, a.version, a.digest)
redis.call('ZADD', key.kept, a.version, a.blob)
redis.call('XADD', key.models, 'MAXLEN', '~', VERSIONS_TOLD, '*', 'm', ARGV[2])
return 'created'
