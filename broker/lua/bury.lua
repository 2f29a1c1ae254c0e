-- keys: stream open admitted ended events counts rates letters changes failing
-- undeclared: dead
-- Moves an entry that can't be processed to `dead`. Its task, if any, ends, unless an answer to it
-- was admitted, or the entry came from a site (ARGV[7]) that the task wasn't sent to.
--
-- A site's letters displace only its own: the newest of each site are kept, using an index by site.
-- A site could send letters that end no task without limit, so those are rate-limited.
local KEPT, KEPT_OF_SITE, RATE_OF_SITE = 1000, 100, 10
local group, entry, dead, task, reason, event, site = unpack(ARGV)
guard()
if group ~= '' and redis.call('XACK', key.stream, group, entry) == 0 then return 0 end
if redis.call('XDEL', key.stream, entry) == 0 then return 0 end
local trigger = task ~= '' and redis.call('HGET', key.open, task)
local may = trigger and (site == '' or (cmsgpack.unpack(trigger).site or 'pool') == site)
local ends = may and redis.call('HEXISTS', key.admitted, task) == 0
if site ~= '' and not ends and not within('letter ' .. site, RATE_OF_SITE) then
  count('stray:' .. reasons.LETTER_OVER_LIMIT)
  return 1
end

local own = site == '' or site == 'pool'
local whose, kept = own and 'pool' or site, own and KEPT or KEPT_OF_SITE
local first, last = '[' .. whose .. '|', '(' .. whose .. '}'
local over = redis.call('ZLEXCOUNT', key.letters, first, last) + 1 - kept
for _, one in ipairs(redis.call('ZRANGEBYLEX', key.letters, first, last, 'LIMIT', 0, math.max(over, 0))) do
  redis.call('ZREM', key.letters, one)
  local there = redis.call('XDEL', key.dead, string.sub(one, #whose + 2)) -- may be gone already
  if there == 1 then count('dead_letters_lost') end
end
local letter = redis.call('XADD', key.dead, '*', 'm', dead)
redis.call('ZADD', key.letters, 0, whose .. '|' .. letter)
count('dead_letters')

if ends then end_task(task, '', 'dead', reason, cmsgpack.unpack(event)) end
return 1
