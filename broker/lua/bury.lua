-- keys: stream open admitted ended events counts rates letters
-- undeclared: dead
-- An entry that can't be processed leaves its stream for `dead`; its task, if it has one, ends,
-- unless another answer to it was admitted, or a site (ARGV[7], if it is from one) was not given it.
--
-- A site's letters push out none but its own: of each the newest are kept, by an index of whose they are.
-- Those that end no task it could send without end: within a rate.
local KEPT, KEPT_OF_SITE, RATE_OF_SITE = 1000, 100, 10
local group, entry, dead, task, reason, event, site = unpack(ARGV)
guard()
if group ~= '' and redis.call('XACK', key.stream, group, entry) == 0 then return 0 end
if redis.call('XDEL', key.stream, entry) == 0 then return 0 end
local trigger = task ~= '' and redis.call('HGET', key.open, task)
local may = trigger and (site == '' or (cmsgpack.unpack(trigger).site or 'pool') == site)
local ends = may and redis.call('HEXISTS', key.admitted, task) == 0
if site ~= '' and not ends and not within('letter ' .. site, RATE_OF_SITE) then
  count('stray:letter over the limit')
  return 1
end

local own = site == '' or site == 'pool'
local whose, kept = own and 'pool' or site, own and KEPT or KEPT_OF_SITE
local first, last = '[' .. whose .. '|', '(' .. whose .. '}'
local over = redis.call('ZLEXCOUNT', key.letters, first, last) + 1 - kept
for _, one in ipairs(redis.call('ZRANGEBYLEX', key.letters, first, last, 'LIMIT', 0, math.max(over, 0))) do
  redis.call('ZREM', key.letters, one)
  local there = redis.call('XDEL', key.dead, string.sub(one, #whose + 2)) -- an operator may have dropped it
  if there == 1 then count('dead_letters_lost') end
end
local letter = redis.call('XADD', key.dead, '*', 'm', dead)
redis.call('ZADD', key.letters, 0, whose .. '|' .. letter)
count('dead_letters')

if ends then end_task(task, '', 'dead', reason, cmsgpack.unpack(event)) end
return 1
