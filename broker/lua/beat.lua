-- keys: stream alive owners working owned counts rates
-- Hears from a trainer whose devices are on the register, with the list that it names by its digest.
-- If they aren't, or somebody else's list took its place, the note is withdrawn by which a trainer
-- knows that heartbeats will do: then it sends its list. ARGV: the heartbeat, what to keep of it.
local a = cmsgpack.unpack(ARGV[1])
guard()
if not take(key.stream, a.group, a.entry) then return 'repeated' end
if not within('announced ' .. a.site, a.rate) then
  count('stray:' .. reasons.ANNOUNCEMENT_OVER_LIMIT)
  return 'over'
end
local is_alive = tonumber(redis.call('ZSCORE', key.alive, a.name) or 0) > 0
if is_alive then
  local now = redis.call('TIME')
  redis.call('ZADD', key.alive, now[1] .. '.' .. string.format('%06d', now[2]), a.name)
  redis.call('HSET', key.working, a.name, ARGV[2])
end
-- The register may have been moved aside as a whole, if somebody put a foreign value in its place.
local is_there = redis.call('EXISTS', key.owners) == 1
if is_alive and is_there and redis.call('GET', key.owned) == a.owns then return 'heard' end
redis.call('UNLINK', key.owned)
return 'unknown'
