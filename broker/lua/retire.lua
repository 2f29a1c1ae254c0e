-- keys: tokens kept
-- Deletes models early. No memory guard here: freeing memory must not need any. rest: the keys of
-- the blobs named in ARGV.
local foreign = fenced(ARGV[1], 'updater')
if foreign then return foreign end
for i = 2, #ARGV do redis.call('ZREM', key.kept, ARGV[i]) end
for i = first_rest, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 'done'
