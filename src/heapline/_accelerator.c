/* The accelerator: C versions of the functions in which an embedded lifecycle spends most of its CPU time.

Each function has a twin in Python, decorated with `accelerated` (accelerator.py), that returns the same results and
rejects the same input. The twin's docstring is the specification; comments here say only what is different in C.

Rules of this file:
- Only the stable ABI of Python 3.11, so that one binary serves every later version.
- Every length, offset and type is checked before memory is read or written. Sums cannot overflow: operands are at
  most PY_SSIZE_T_MAX and the sums are unsigned, or the check subtracts instead.
- No Python code runs between a check and the use of what was checked: items are of exact built-in types, and a list is
  read only while nothing can change it.
- Buffers are released on every path. The GIL is released only to read buffers that are held.
*/

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Heapline writes its columns in place, so it needs a little-endian machine"
#endif

/* Raised whenever a signature or a result changes; accelerator.py has the same number and refuses another. */
#define VERSION 1

static uint32_t load32(const uint8_t *from) { uint32_t v; memcpy(&v, from, 4); return v; }
static uint64_t load64(const uint8_t *from) { uint64_t v; memcpy(&v, from, 8); return v; }
static void store32(uint8_t *to, uint32_t v) { memcpy(to, &v, 4); }

/* --- crc32c ------------------------------------------------------------------------------------------------------- */

typedef uint32_t (*crc_function)(uint32_t crc, const uint8_t *data, size_t length);

static uint32_t crc_tables[8][256];

static void fill_crc_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0);
        crc_tables[0][byte] = crc;
    }
    for (int table = 1; table < 8; table++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = crc_tables[table - 1][byte];
            crc_tables[table][byte] = (crc >> 8) ^ crc_tables[0][crc & 0xFF];
        }
}

/* Portable: eight bytes per step, from eight tables. */
static uint32_t crc_by_table(uint32_t crc, const uint8_t *data, size_t length) {
    for (; length >= 8; data += 8, length -= 8) {
        uint32_t low = load32(data) ^ crc, high = load32(data + 4);
        crc = crc_tables[7][low & 0xFF] ^ crc_tables[6][low >> 8 & 0xFF] ^ crc_tables[5][low >> 16 & 0xFF] ^
              crc_tables[4][low >> 24] ^ crc_tables[3][high & 0xFF] ^ crc_tables[2][high >> 8 & 0xFF] ^
              crc_tables[1][high >> 16 & 0xFF] ^ crc_tables[0][high >> 24];
    }
    while (length--)
        crc = (crc >> 8) ^ crc_tables[0][(crc ^ *data++) & 0xFF];
    return crc;
}

/* The instructions are written in assembly, because compilers disagree about how to allow them in one function. */
#if defined(__x86_64__)

static uint32_t crc_by_cpu(uint32_t crc, const uint8_t *data, size_t length) {
    uint64_t wide = crc;
    for (; length >= 8; data += 8, length -= 8)
        __asm__("crc32q %1, %0" : "+r"(wide) : "r"(load64(data)));
    crc = (uint32_t)wide;
    while (length--)
        __asm__("crc32b %1, %0" : "+r"(crc) : "r"(*data++));
    return crc;
}

static const char cpu_checksums[] = "SSE4.2";
static int cpu_has_crc(void) { __builtin_cpu_init(); return __builtin_cpu_supports("sse4.2") != 0; }

#elif defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__))

static uint32_t crc_by_cpu(uint32_t crc, const uint8_t *data, size_t length) {
    for (; length >= 8; data += 8, length -= 8)
        __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(load64(data)));
    while (length--)
        __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"((uint32_t)*data++));
    return crc;
}

static const char cpu_checksums[] = "ARMv8 CRC";
#if defined(__linux__)
#include <sys/auxv.h>
#define HWCAP_OF_CRC32 (1UL << 7)
static int cpu_has_crc(void) { return (getauxval(AT_HWCAP) & HWCAP_OF_CRC32) != 0; }
#else
static int cpu_has_crc(void) { return 1; } /* every Apple processor of this architecture has it */
#endif

#else
#define crc_by_cpu crc_by_table
static const char cpu_checksums[] = "";
static int cpu_has_crc(void) { return 0; }
#endif

static crc_function crc_continue = crc_by_table; /* set once, when the module is imported */
static uint32_t crc32c(const uint8_t *data, size_t length) { return ~crc_continue(~0u, data, length); }

static PyObject *checksum(PyObject *object, crc_function function) {
    Py_buffer data;
    if (PyObject_GetBuffer(object, &data, PyBUF_SIMPLE) < 0)
        return NULL;
    uint32_t crc = ~function(~0u, data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

/* Both ways to compute the checksum, for tests. */
static PyObject *crc32c_chosen(PyObject *self, PyObject *data) { return checksum(data, crc_continue); }
static PyObject *crc32c_portable(PyObject *self, PyObject *data) { return checksum(data, crc_by_table); }

/* --- Arguments ---------------------------------------------------------------------------------------------------- */

static int expect(Py_ssize_t count, Py_ssize_t expected) {
    if (count == expected)
        return 1;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
    return 0;
}

static int is_list(PyObject *object, const char *name) {
    if (PyList_CheckExact(object))
        return 1;
    PyErr_Format(PyExc_TypeError, "%s must be a list", name);
    return 0;
}

/* Set `bytes` and `length` to those of an exact bytes object. */
static int read_bytes(PyObject *object, const uint8_t **bytes, size_t *length) {
    char *start;
    Py_ssize_t size;
    if (!PyBytes_CheckExact(object)) {
        PyErr_SetString(PyExc_TypeError, "records must be bytes");
        return 0;
    }
    if (PyBytes_AsStringAndSize(object, &start, &size) < 0)
        return 0;
    *bytes = (const uint8_t *)start;
    *length = (size_t)size;
    return 1;
}

/* An exact int runs no Python code when it is converted. This function is three times as fast as PyLong_AsLongLong. */
static int read_int64(PyObject *object, int64_t *value) {
    int overflow = 0;
    if (!PyLong_CheckExact(object)) {
        PyErr_SetString(PyExc_TypeError, "numbers must be int");
        return 0;
    }
    *value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow)
        PyErr_SetString(PyExc_OverflowError, "numbers must be from -2^63 to 2^63 - 1");
    return !overflow;
}

/* --- Blocks of records (journal/block.py) ------------------------------------------------------------------------- */

#define ROW_BYTES 80
#define ALIGN 16
/* The fields of a row, as in core/record.py. */
enum { CRC = 0, PAYLOAD_CRC = 4, PAYLOAD_AT = 8, PAYLOAD_LEN = 12, SMALL_AT = 16, SMALL_LEN = 20 };

/* Add up the lengths of the bytes objects in `parts`. All of them are checked, so that no later step can fail. */
static int add_lengths(PyObject *parts, Py_ssize_t count, uint64_t *total) {
    if (!is_list(parts, "small parts and payloads"))
        return 0;
    if (PyList_Size(parts) != count) {
        PyErr_SetString(PyExc_ValueError, "the numbers of rows, small parts and payloads must be equal");
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const uint8_t *bytes;
        size_t length;
        if (!read_bytes(PyList_GetItem(parts, i), &bytes, &length))
            return 0;
        *total += length;
        if (*total > UINT32_MAX) {
            PyErr_SetString(PyExc_ValueError, "a block must be smaller than 4 GiB");
            return 0;
        }
    }
    return 1;
}

static size_t copy_part(PyObject *parts, Py_ssize_t i, uint8_t *to) {
    const uint8_t *bytes = to;
    size_t length = 0;
    if (read_bytes(PyList_GetItem(parts, i), &bytes, &length)) /* always: add_lengths has read it */
        memcpy(to, bytes, length);
    return length;
}

static void fill_block(uint8_t *block, uint8_t *rows, Py_ssize_t count, PyObject *smalls, PyObject *payloads,
                       uint8_t *small_at, uint8_t *payload_at, size_t padding) {
    for (Py_ssize_t i = 0; i < count; i++) {
        uint8_t *row = rows + i * ROW_BYTES, *start = block + i * ROW_BYTES;
        size_t small_length = smalls == Py_None ? 0 : copy_part(smalls, i, small_at);
        size_t payload_length = copy_part(payloads, i, payload_at);
        store32(row + PAYLOAD_CRC, crc32c(payload_at, payload_length));
        store32(row + PAYLOAD_AT, (uint32_t)(payload_at - start));
        store32(row + PAYLOAD_LEN, (uint32_t)payload_length);
        store32(row + SMALL_AT, (uint32_t)(small_at - start));
        store32(row + SMALL_LEN, (uint32_t)small_length);
        uint32_t crc = crc_continue(~0u, row + 4, ROW_BYTES - 4);
        store32(row + CRC, ~crc_continue(crc, small_at, small_length));
        memcpy(start, row, ROW_BYTES);
        small_at += small_length;
        payload_at += payload_length;
    }
    memset(payload_at, 0, padding);
}

/* lay_out(rows, smalls or None, payloads) -> (block, bytes of small parts, bytes of payloads) */
static PyObject *lay_out(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer rows;
    PyObject *block = NULL;
    if (!expect(nargs, 3) || PyObject_GetBuffer(args[0], &rows, PyBUF_WRITABLE) < 0)
        return NULL;
    PyObject *smalls = args[1], *payloads = args[2];
    Py_ssize_t count = rows.len / ROW_BYTES;
    uint64_t smalls_length = 0, payloads_length = 0;
    if (rows.len % ROW_BYTES) {
        PyErr_SetString(PyExc_ValueError, "rows must be a multiple of 80 bytes");
        goto done;
    }
    if (!add_lengths(payloads, count, &payloads_length) ||
        (smalls != Py_None && !add_lengths(smalls, count, &smalls_length)))
        goto done;
    uint64_t content = smalls_length + payloads_length, padding = (ALIGN - content % ALIGN) % ALIGN;
    if ((uint64_t)rows.len + content + padding > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a block must be smaller than 4 GiB");
        goto done;
    }
    block = PyBytes_FromStringAndSize(NULL, rows.len + (Py_ssize_t)(content + padding));
    if (block == NULL)
        goto done;
    uint8_t *start = (uint8_t *)PyBytes_AsString(block), *small_at = start + rows.len;
    fill_block(start, rows.buf, count, smalls, payloads, small_at, small_at + smalls_length, (size_t)padding);
done:
    PyBuffer_Release(&rows);
    if (block == NULL)
        return NULL;
    return Py_BuildValue("NKK", block, (unsigned long long)smalls_length, (unsigned long long)payloads_length);
}

/* --- Records by position (journal/records.py) --------------------------------------------------------------------- */

/* Return the part of a record, or NULL if it reaches past its block. */
static PyObject *cut_part(const uint8_t *block, size_t length, size_t row_at, int at_field, int length_field) {
    const uint8_t *row = block + row_at;
    size_t at = load32(row + at_field), part_length = load32(row + length_field), left = length - row_at;
    if (part_length == 0)
        return PyBytes_FromStringAndSize(NULL, 0);
    if (at > left || part_length > left - at) {
        PyErr_SetString(PyExc_ValueError, "a record reaches past its block");
        return NULL;
    }
    return PyBytes_FromStringAndSize((const char *)row + at, (Py_ssize_t)part_length);
}

static int cut_record(PyObject *blocks, int64_t which, int64_t offset, Py_ssize_t i, uint8_t *row, PyObject *payloads,
                      PyObject *smalls) {
    const uint8_t *block;
    size_t length;
    if (which < 0 || which >= PyList_Size(blocks)) {
        PyErr_SetString(PyExc_ValueError, "no block has this index");
        return 0;
    }
    if (!read_bytes(PyList_GetItem(blocks, (Py_ssize_t)which), &block, &length))
        return 0;
    if (offset < 0 || length < ROW_BYTES || (uint64_t)offset > length - ROW_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a record reaches past its block");
        return 0;
    }
    memcpy(row, block + offset, ROW_BYTES);
    PyObject *payload = cut_part(block, length, (size_t)offset, PAYLOAD_AT, PAYLOAD_LEN);
    if (payload == NULL || PyList_SetItem(payloads, i, payload) < 0)
        return 0;
    PyObject *small = cut_part(block, length, (size_t)offset, SMALL_AT, SMALL_LEN);
    return small != NULL && PyList_SetItem(smalls, i, small) == 0;
}

/* cut_records(blocks, which, offsets) -> (rows, payloads, smalls). Each block is kept alive by the list, which no one
   can change meanwhile: allocating bytes objects runs no Python code. */
static PyObject *cut_records(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer which, offsets;
    PyObject *rows = NULL, *payloads = NULL, *smalls = NULL, *result = NULL;
    if (!expect(nargs, 3) || !is_list(args[0], "blocks") || PyObject_GetBuffer(args[1], &which, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[2], &offsets, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&which);
        return NULL;
    }
    Py_ssize_t count = which.len / 8;
    if (which.len % 8 || offsets.len != which.len || count > PY_SSIZE_T_MAX / ROW_BYTES) {
        PyErr_SetString(PyExc_ValueError, "indexes and offsets must be columns of int64 of the same length");
        goto done;
    }
    rows = PyByteArray_FromStringAndSize(NULL, count * ROW_BYTES);
    payloads = PyList_New(count);
    smalls = PyList_New(count);
    if (rows == NULL || payloads == NULL || smalls == NULL)
        goto done;
    uint8_t *row = (uint8_t *)PyByteArray_AsString(rows);
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t block = (int64_t)load64((const uint8_t *)which.buf + 8 * i);
        int64_t offset = (int64_t)load64((const uint8_t *)offsets.buf + 8 * i);
        if (!cut_record(args[0], block, offset, i, row + i * ROW_BYTES, payloads, smalls))
            goto done;
    }
    result = PyTuple_Pack(3, rows, payloads, smalls);
done:
    PyBuffer_Release(&which);
    PyBuffer_Release(&offsets);
    Py_XDECREF(rows);
    Py_XDECREF(payloads);
    Py_XDECREF(smalls);
    return result;
}

/* --- Sector sums (journal/sectors.py) ----------------------------------------------------------------------------- */

#define SECTOR 512
#define WORDS (SECTOR / 8)
#define PARTS_MAX 4096
#define WITHOUT_GIL_BYTES (32 << 10) /* summing fewer bytes is faster than releasing the GIL */

static uint64_t sector_constants[WORDS];

static void fill_sector_constants(void) {
    uint64_t word = 0x9E3779B97F4A7C15u;
    for (int i = 0; i < WORDS; i++) {
        word = word * 6364136223846793005u + 1442695040888963407u;
        sector_constants[i] = (word ^ (word >> 29)) | 1;
    }
}

static uint32_t sector_sum(const uint8_t *sector) {
    uint64_t sum = 0;
    for (int i = 0; i < WORDS; i++)
        sum += load64(sector + 8 * i) * sector_constants[i];
    uint32_t folded = (uint32_t)(sum ^ (sum >> 32));
    return folded ? folded : 1;
}

/* Sum all sectors of data in parts. A sector that spans parts is copied together first. */
static void sum_parts(const Py_buffer *parts, Py_ssize_t count, uint8_t *table) {
    uint8_t edge[SECTOR];
    size_t in_edge = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const uint8_t *data = parts[i].buf;
        size_t left = (size_t)parts[i].len;
        while (left) {
            if (in_edge == 0 && left >= SECTOR) {
                store32(table, sector_sum(data));
                table += 4, data += SECTOR, left -= SECTOR;
                continue;
            }
            size_t taken = left < SECTOR - in_edge ? left : SECTOR - in_edge;
            memcpy(edge + in_edge, data, taken);
            data += taken, left -= taken, in_edge += taken;
            if (in_edge == SECTOR) {
                store32(table, sector_sum(edge));
                table += 4, in_edge = 0;
            }
        }
    }
}

/* sector_table(parts, sectors) -> bytes. All buffers are taken before any is read, because taking one may run Python
   code. */
static PyObject *sector_table(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    int64_t sectors;
    if (!expect(nargs, 2) || !is_list(args[0], "parts") || !read_int64(args[1], &sectors))
        return NULL;
    Py_ssize_t count = PyList_Size(args[0]), held = 0;
    PyObject *table = NULL;
    uint64_t total = 0;
    if (count > PARTS_MAX)
        return PyErr_Format(PyExc_ValueError, "at most %d parts can be summed, not %zd", PARTS_MAX, count);
    Py_buffer *parts = PyMem_Calloc((size_t)count + 1, sizeof(Py_buffer));
    if (parts == NULL)
        return PyErr_NoMemory();
    while (held < count && held < PyList_Size(args[0]) && total <= PY_SSIZE_T_MAX) {
        PyObject *part = PyList_GetItem(args[0], held);
        Py_INCREF(part);
        int failed = PyObject_GetBuffer(part, &parts[held], PyBUF_SIMPLE);
        Py_DECREF(part);
        if (failed)
            goto done;
        total += (uint64_t)parts[held++].len;
    }
    if (sectors < 0 || total > PY_SSIZE_T_MAX || total % SECTOR || total / SECTOR != (uint64_t)sectors) {
        PyErr_SetString(PyExc_ValueError, "the parts must be as long as the sectors");
        goto done;
    }
    table = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * sectors));
    if (table == NULL)
        goto done;
    uint8_t *entries = (uint8_t *)PyBytes_AsString(table);
    PyThreadState *thread = total < WITHOUT_GIL_BYTES ? NULL : PyEval_SaveThread();
    sum_parts(parts, held, entries);
    if (thread != NULL)
        PyEval_RestoreThread(thread);
done:
    for (Py_ssize_t i = 0; i < held; i++)
        PyBuffer_Release(&parts[i]);
    PyMem_Free(parts);
    return table;
}

/* --- Leases (core/leases.py) -------------------------------------------------------------------------------------- */

/* A lease is 64 bytes here; as a dict item of a tuple of Python numbers it is more than 300. Entries are in the order
   of their grants, as in a dict. The index is a hash table of entry numbers with linear probing. An entry that ended
   stays, without a holder, until the entries are full; so the index, twice as large, always has empty slots. */
typedef struct {
    int64_t id, token, position, key, deadline, started;
    PyObject *holder; /* an exact str or None; NULL: the lease has ended */
    uint64_t seen;    /* the last call of `held` that found it */
} Lease;

typedef struct {
    PyObject_HEAD
    Lease *leases;
    uint32_t *index;
    size_t capacity; /* of leases: 0 or a power of two; that of the index is twice as much */
    size_t filled;   /* entries in use, ended ones included */
    size_t live;
    uint64_t calls; /* of `held` */
} LeaseMap;

#define NO_ENTRY UINT32_MAX
#define CAPACITY_MIN 64
#define CAPACITY_MAX ((size_t)1 << 31)

static size_t first_slot(int64_t id, size_t mask) {
    uint64_t x = (uint64_t)id;
    x ^= x >> 33;
    x *= 0xFF51AFD7ED558CCDu;
    x ^= x >> 33;
    return (size_t)x & mask;
}

static Lease *find(LeaseMap *map, int64_t id) {
    if (map->live == 0)
        return NULL;
    size_t mask = 2 * map->capacity - 1;
    for (size_t slot = first_slot(id, mask);; slot = (slot + 1) & mask) {
        if (map->index[slot] == NO_ENTRY)
            return NULL;
        Lease *lease = &map->leases[map->index[slot]];
        if (lease->id == id && lease->holder != NULL)
            return lease;
    }
}

/* Add an entry, for which `reserve` has made room. Takes over the reference to the holder. The slot of a lease that has
   ended is used again: else a message that is leased many times would leave a long chain of them. */
static void append(LeaseMap *map, const Lease *lease) {
    size_t mask = 2 * map->capacity - 1, slot = first_slot(lease->id, mask);
    while (map->index[slot] != NO_ENTRY && map->leases[map->index[slot]].holder != NULL)
        slot = (slot + 1) & mask;
    map->index[slot] = (uint32_t)map->filled;
    map->leases[map->filled++] = *lease;
    map->live++;
}

/* Make room for more leases. If there is too little, drop those that have ended, if possible in the same memory. */
static int reserve(LeaseMap *map, size_t more) {
    if (more <= map->capacity - map->filled)
        return 1;
    size_t need = map->live + more, capacity = CAPACITY_MIN, filled = map->filled;
    if (need > CAPACITY_MAX / 2) {
        PyErr_NoMemory();
        return 0;
    }
    while (capacity < need + need / 2)
        capacity *= 2;
    Lease *old = map->leases;
    if (capacity != map->capacity) {
        Lease *leases = PyMem_Malloc(capacity * sizeof(Lease));
        uint32_t *index = PyMem_Malloc(2 * capacity * sizeof(uint32_t));
        if (leases == NULL || index == NULL) {
            PyMem_Free(leases);
            PyMem_Free(index);
            PyErr_NoMemory();
            return 0;
        }
        PyMem_Free(map->index);
        map->leases = leases, map->index = index, map->capacity = capacity;
    }
    memset(map->index, 0xFF, 2 * capacity * sizeof(uint32_t));
    map->filled = map->live = 0;
    for (size_t i = 0; i < filled; i++)
        if (old[i].holder != NULL)
            append(map, &old[i]); /* never beyond the one that is read */
    if (old != map->leases)
        PyMem_Free(old);
    return 1;
}

/* Add a lease or replace one. Takes over the reference to the holder. There must be room. */
static void put(LeaseMap *map, const Lease *lease) {
    Lease *old = find(map, lease->id);
    if (old == NULL) {
        append(map, lease);
        return;
    }
    PyObject *holder = old->holder;
    *old = *lease;
    Py_DECREF(holder); /* a str or None: runs no Python code */
}

/* Return a lease as a tuple. It is a copy, because creating the tuple may run the garbage collector. */
static PyObject *as_tuple(Lease lease) {
    Py_INCREF(lease.holder);
    return Py_BuildValue("LLLLLN", (long long)lease.token, (long long)lease.position, (long long)lease.key,
                         (long long)lease.deadline, (long long)lease.started, lease.holder);
}

/* Check that two lists of numbers are as long as each other. */
static int are_columns(PyObject *ids, PyObject *others) {
    if (!is_list(ids, "a column") || !is_list(others, "a column"))
        return 0;
    if (PyList_Size(ids) == PyList_Size(others))
        return 1;
    PyErr_SetString(PyExc_ValueError, "columns must have the same length");
    return 0;
}

/* Find the lease of any integer, as a dict does: one that is not an int64 has none. */
static int find_object(LeaseMap *map, PyObject *key, Lease **lease) {
    int overflow = 0;
    PyObject *number = PyNumber_Index(key);
    if (number == NULL)
        return 0;
    int64_t id = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    *lease = overflow ? NULL : find(map, id);
    return 1;
}

/* grant(ids, token, positions, keys, deadline, started, holder). All numbers are read before the first is stored. */
static PyObject *map_grant(LeaseMap *self, PyObject *const *args, Py_ssize_t nargs) {
    Lease lease = {0};
    if (!expect(nargs, 7) || !are_columns(args[0], args[2]) || !are_columns(args[0], args[3]) ||
        !read_int64(args[1], &lease.token) || !read_int64(args[4], &lease.deadline) ||
        !read_int64(args[5], &lease.started))
        return NULL;
    if (args[6] != Py_None && !PyUnicode_CheckExact(args[6]))
        return PyErr_Format(PyExc_TypeError, "a holder must be str or None");
    Py_ssize_t count = PyList_Size(args[0]);
    if (lease.token < 0 || lease.token > INT64_MAX - count)
        return PyErr_Format(PyExc_OverflowError, "tokens must be from 0 to 2^63 - 1");
    if (!reserve(self, (size_t)count))
        return NULL;
    for (int is_checked = 0; is_checked < 2; is_checked++)
        for (Py_ssize_t i = 0; i < count; i++) {
            if (!read_int64(PyList_GetItem(args[0], i), &lease.id) ||
                !read_int64(PyList_GetItem(args[2], i), &lease.position) ||
                !read_int64(PyList_GetItem(args[3], i), &lease.key))
                return NULL;
            if (is_checked) {
                lease.holder = args[6];
                Py_INCREF(lease.holder);
                put(self, &lease);
                lease.token++;
            }
        }
    Py_RETURN_NONE;
}

/* held(ids, tokens) -> (held ids, their tokens, ids that are not held). A repeated id is known by `seen`. */
static PyObject *map_held(LeaseMap *self, PyObject *const *args, Py_ssize_t nargs) {
    if (!expect(nargs, 2) || !are_columns(args[0], args[1]))
        return NULL;
    PyObject *ids = PyList_New(0), *tokens = PyList_New(0), *lost = PyList_New(0), *result = NULL;
    if (ids == NULL || tokens == NULL || lost == NULL)
        goto done;
    uint64_t call = ++self->calls;
    for (Py_ssize_t i = 0; i < PyList_Size(args[0]) && i < PyList_Size(args[1]); i++) {
        PyObject *id = PyList_GetItem(args[0], i), *token = PyList_GetItem(args[1], i);
        int64_t id_number, token_number;
        if (!read_int64(id, &id_number) || !read_int64(token, &token_number))
            goto done;
        Lease *lease = find(self, id_number);
        if (lease == NULL || lease->token != token_number) {
            if (PyList_Append(lost, id) < 0)
                goto done;
        } else if (lease->seen != call) {
            lease->seen = call;
            if (PyList_Append(ids, id) < 0 || PyList_Append(tokens, token) < 0)
                goto done;
        }
    }
    result = PyTuple_Pack(3, ids, tokens, lost);
done:
    Py_XDECREF(ids);
    Py_XDECREF(tokens);
    Py_XDECREF(lost);
    return result;
}

/* Append (holder, count). Takes over the reference to the holder, which may be NULL. */
static int append_run(PyObject *runs, PyObject *holder, Py_ssize_t count) {
    if (holder == NULL)
        return 1;
    PyObject *run = Py_BuildValue("Nn", holder, count);
    int failed = run == NULL || PyList_Append(runs, run) < 0;
    Py_XDECREF(run);
    return !failed;
}

/* end(ids) -> (positions as packed int64, [(holder, count), …]). Appending may run the collector, so nothing of a
   lease is used afterwards, and the list of ids is checked each time. */
static PyObject *map_end(LeaseMap *self, PyObject *ids) {
    if (!is_list(ids, "ids"))
        return NULL;
    Py_ssize_t count = PyList_Size(ids), start = 0;
    PyObject *runs = PyList_New(0), *positions = PyBytes_FromStringAndSize(NULL, 8 * count), *holder = NULL;
    if (runs == NULL || positions == NULL)
        goto failed;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *key = i < PyList_Size(ids) ? PyList_GetItem(ids, i) : Py_None; /* None is refused */
        int64_t id;
        Lease *lease = read_int64(key, &id) ? find(self, id) : NULL;
        if (lease == NULL && !PyErr_Occurred())
            PyErr_SetObject(PyExc_KeyError, key);
        if (lease == NULL)
            goto failed;
        memcpy(PyBytes_AsString(positions) + 8 * i, &lease->position, 8);
        PyObject *before = holder;
        holder = lease->holder; /* its reference moves here */
        lease->holder = NULL;
        self->live--;
        if (before == holder) {
            Py_DECREF(before);
        } else {
            if (!append_run(runs, before, i - start))
                goto failed;
            start = i;
        }
    }
    if (append_run(runs, holder, count - start))
        return Py_BuildValue("NN", positions, runs);
    holder = NULL;
failed:
    Py_XDECREF(holder);
    Py_XDECREF(runs);
    Py_XDECREF(positions);
    return NULL;
}

/* first_current(ids, start, deadline) -> the index of the first lease that ends by the deadline, or -1 */
static PyObject *map_first_current(LeaseMap *self, PyObject *const *args, Py_ssize_t nargs) {
    int64_t start, deadline, id;
    if (!expect(nargs, 3) || !is_list(args[0], "ids") || !read_int64(args[1], &start) ||
        !read_int64(args[2], &deadline))
        return NULL;
    if (start < 0)
        return PyErr_Format(PyExc_ValueError, "start must not be negative");
    for (; start < PyList_Size(args[0]); start++) {
        if (!read_int64(PyList_GetItem(args[0], (Py_ssize_t)start), &id))
            return NULL;
        Lease *lease = find(self, id);
        if (lease != NULL && lease->deadline <= deadline)
            return PyLong_FromLongLong(start);
    }
    return PyLong_FromLong(-1);
}

static PyObject *map_get(LeaseMap *self, PyObject *key) {
    Lease *lease;
    if (!find_object(self, key, &lease))
        return NULL;
    if (lease == NULL)
        Py_RETURN_NONE;
    return as_tuple(*lease);
}

static PyObject *map_subscript(LeaseMap *self, PyObject *key) {
    PyObject *lease = map_get(self, key);
    if (lease != Py_None)
        return lease;
    PyErr_SetObject(PyExc_KeyError, key);
    Py_DECREF(lease);
    return NULL;
}

static int map_contains(LeaseMap *self, PyObject *key) {
    Lease *lease;
    return find_object(self, key, &lease) ? lease != NULL : -1;
}

static Py_ssize_t map_length(LeaseMap *self) { return (Py_ssize_t)self->live; }

/* Return a list with an item for each lease. Creating one may run the collector, so the map is read again each time. */
static PyObject *list_of(LeaseMap *self, PyObject *(*item_of)(Lease lease)) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < self->filled; i++) {
        if (self->leases[i].holder == NULL)
            continue;
        PyObject *item = item_of(self->leases[i]);
        if (item == NULL || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *id_of(Lease lease) { return PyLong_FromLongLong(lease.id); }

static PyObject *map_values(LeaseMap *self, PyObject *none) { return list_of(self, as_tuple); }

static PyObject *map_iterator(LeaseMap *self) {
    PyObject *ids = list_of(self, id_of), *iterator = ids == NULL ? NULL : PyObject_GetIter(ids);
    Py_XDECREF(ids);
    return iterator;
}

static void map_dealloc(LeaseMap *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (size_t i = 0; i < self->filled; i++)
        Py_XDECREF(self->leases[i].holder);
    PyMem_Free(self->leases);
    PyMem_Free(self->index);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

#define METHOD(name, function, flags) {name, (PyCFunction)(void (*)(void))function, flags, NULL}

static PyMethodDef map_methods[] = {
    METHOD("grant", map_grant, METH_FASTCALL),
    METHOD("held", map_held, METH_FASTCALL),
    METHOD("end", map_end, METH_O),
    METHOD("first_current", map_first_current, METH_FASTCALL),
    METHOD("get", map_get, METH_O),
    METHOD("values", map_values, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot map_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, map_dealloc},
    {Py_tp_iter, map_iterator},
    {Py_tp_methods, map_methods},
    {Py_mp_length, map_length},
    {Py_mp_subscript, map_subscript},
    {Py_sq_contains, map_contains},
    {0, NULL},
};

static PyType_Spec map_spec = {"heapline._accelerator.LeaseMap", sizeof(LeaseMap), 0, Py_TPFLAGS_DEFAULT, map_slots};

/* --- The module --------------------------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    METHOD("crc32c", crc32c_chosen, METH_O),
    METHOD("crc32c_portable", crc32c_portable, METH_O),
    METHOD("lay_out", lay_out, METH_FASTCALL),
    METHOD("cut_records", cut_records, METH_FASTCALL),
    METHOD("sector_table", sector_table, METH_FASTCALL),
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module) {
    fill_crc_tables();
    fill_sector_constants();
    int by_cpu = cpu_has_crc();
    crc_continue = by_cpu ? crc_by_cpu : crc_by_table;
    PyObject *type = PyType_FromModuleAndSpec(module, &map_spec, NULL);
    int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0;
    Py_XDECREF(type);
    if (failed || PyModule_AddIntConstant(module, "VERSION", VERSION) < 0)
        return -1;
    return PyModule_AddStringConstant(module, "CHECKSUMS", by_cpu ? cpu_checksums : "portable");
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_accelerator", "C versions of hot functions; see accelerator.py.", 0, functions, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__accelerator(void) { return PyModuleDef_Init(&definition); }
