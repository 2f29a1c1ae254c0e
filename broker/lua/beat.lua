-- keys: stream alive owners working owned counts rates
-- Hears from a trainer whose devices are on the register, with the list that it names by its digest.
-- Then the note lives on by which the trainer knows that heartbeats will do. If they aren't, or
-- another list took its place, the note is withdrawn: then the trainer sends its list. ARGV: the
-- heartbeat, what to keep of it.
local a = cmsgpack.unpack(ARGV[1])
guard()
if not take(key.stream, a.group, a.entry) then return 'repeated' end
local is_alive = tonumber(redis.call('ZSCORE', key.alive, a.name) or 0) > 0
if is_alive then -- also over the limit, by which nobody is struck off as silent
  local now = redis.call('TIME')
  redis.call('ZADD', key.alive, now[1] .. '.' .. string.format('%06d', now[2]), a.name)
end
if not within('announced ' .. a.site, a.rate) then
  count('stray:' .. reasons.ANNOUNCEMENT_OVER_LIMIT)
  return 'over'
end
if is_alive then redis.call('HSET', key.working, a.name, ARGV[2]) end
-- The register may have been moved aside as a whole, if somebody put a foreign value in its place.
local is_there = redis.call('EXISTS', key.owners) == 1
local till_ms, digest = string.match(redis.call('GET', key.owned) or '', '^(%d+) (.*)$')
if is_alive and is_there and digest == a.owns then
  note_list(digest, tonumber(till_ms))
  return 'heard'
end
redis.call('UNLINK', key.owned)
return 'unknown'
