-- keys: blob note
-- Writes a chunk of an update that arrives in parts, if the note beside it is still that of this
-- upload: another one may have begun in its place. ARGV: the chunk's number, the chunk, the note as
-- its writer knows it, the note from now on, and what expires in ms. 1: written.
local number, chunk, before, after, expire_ms = unpack(ARGV)
local note = redis.call('GET', key.note)
if note ~= before and note ~= after then return 0 end
if redis.call('HEXISTS', key.blob, 'size') == 0 then return 0 end
redis.call('HSET', key.blob, number, chunk)
redis.call('PEXPIRE', key.blob, expire_ms)
redis.call('SET', key.note, after, 'PX', expire_ms)
return 1
