-- keys: counts
-- undeclared: dead
-- Deletes dead letters older than ARGV[1] seconds. Returns how many.
local oldest = math.max(redis.call('TIME')[1] - ARGV[1], 0)
local gone = redis.call('XTRIM', key.dead, 'MINID', string.format('%.0f', oldest * 1000))
if gone > 0 then redis.call('HINCRBY', key.counts, 'dead_letters_lost', gone) end
return gone
