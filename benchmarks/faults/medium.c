/* A medium that fails as it is told to: loaded before libc into any program, which needs no change and notices nothing.
 *
 * Calls that read or write files under $FAULTS_UNDER look at the order in the file $FAULTS_ORDER, which is mapped into
 * memory, and do as it says; all others pass. `medium.py` builds this and gives the orders.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { FINE, EIO_READ, ENOSPC_WRITE, HANG_READ, LATE_READ, LIE_WRITE, KILL_WRITE };

struct order {
    volatile int what;
    volatile int countdown; /* of KILL_WRITE: so many large writes go well before it */
    volatile int num_hits;  /* how many calls it was carried out on */
    volatile int delay_ms;  /* of LATE_READ */
};

static struct order *order;
static const char *under;
static const size_t LARGE = 16384;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULTS_ORDER");
    under = getenv("FAULTS_UNDER");
    int fd = path && under ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof *order, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED) order = mapped;
}

static int is_ours(int fd) {
    if (!order || order->what == FINE) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return !strncmp(path, under, strlen(under));
}

static void wait_ms(long ms) {
    struct timespec each = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&each, &each) && errno == EINTR) {}
}

static size_t total(const struct iovec *parts, int count) {
    size_t bytes = 0;
    for (int i = 0; i < count; i++) bytes += parts[i].iov_len;
    return bytes;
}

/* Return -1 where the call is to fail. */
static int before_read(int fd) {
    if (!is_ours(fd)) return 0;
    int what = order->what;
    if (what == EIO_READ) {
        __sync_fetch_and_add(&order->num_hits, 1);
        errno = EIO;
        return -1;
    }
    if (what == HANG_READ || what == LATE_READ) {
        __sync_fetch_and_add(&order->num_hits, 1);
        if (what == LATE_READ) wait_ms(order->delay_ms);
        else while (order->what == HANG_READ) wait_ms(5);
    }
    return 0;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Write past the orders, at a place or, at -1, where the file stands. */
static ssize_t put(int fd, const void *from, size_t bytes, off64_t at) {
    if (at >= 0) { REAL(pwrite64); return real(fd, from, bytes, at); }
    REAL(write);
    return real(fd, from, bytes);
}

/* Say whether the call was dealt with; `did` is what it is to return then. `first` begins what the caller writes. */
static int wrote(int fd, const void *first, size_t first_bytes, size_t bytes, off64_t at, ssize_t *did) {
    if (!is_ours(fd)) return 0;
    int what = order->what;
    if (what == ENOSPC_WRITE) {
        __sync_fetch_and_add(&order->num_hits, 1);
        errno = ENOSPC;
        *did = -1;
        return 1;
    }
    if (bytes < LARGE) return 0;
    if (what == LIE_WRITE) {
        void *zeros;
        __sync_fetch_and_add(&order->num_hits, 1);
        if (posix_memalign(&zeros, 4096, bytes)) abort();
        memset(zeros, 0, bytes);
        *did = put(fd, zeros, bytes, at);
        free(zeros);
        return 1;
    }
    if (what == KILL_WRITE && __sync_fetch_and_sub(&order->countdown, 1) <= 0) {
        __sync_fetch_and_add(&order->num_hits, 1);
        size_t half = bytes / 2 / 4096 * 4096; /* whole pages, as O_DIRECT asks */
        *did = put(fd, first, half < first_bytes ? half : first_bytes, at);
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    return 0;
}

#define READ(name, fd, ...) REAL(name); return before_read(fd) ? -1 : real(fd, __VA_ARGS__)
#define WRITE(name, at, fd, from, bytes, ...) \
    REAL(name); ssize_t did; \
    return wrote(fd, from, bytes, bytes, at, &did) ? did : real(fd, from, bytes, ##__VA_ARGS__)
#define WRITEV(name, at, fd, parts, count, ...) \
    REAL(name); ssize_t did; \
    return wrote(fd, parts->iov_base, parts->iov_len, total(parts, count), at, &did) ? did \
        : real(fd, parts, count, ##__VA_ARGS__)

typedef const struct iovec *parts_t;

ssize_t read(int fd, void *into, size_t n) { READ(read, fd, into, n); }
ssize_t pread(int fd, void *into, size_t n, off_t at) { READ(pread, fd, into, n, at); }
ssize_t pread64(int fd, void *into, size_t n, off64_t at) { READ(pread64, fd, into, n, at); }
ssize_t readv(int fd, parts_t v, int c) { READ(readv, fd, v, c); }
ssize_t preadv(int fd, parts_t v, int c, off_t at) { READ(preadv, fd, v, c, at); }
ssize_t preadv64(int fd, parts_t v, int c, off64_t at) { READ(preadv64, fd, v, c, at); }
ssize_t preadv2(int fd, parts_t v, int c, off_t at, int f) { READ(preadv2, fd, v, c, at, f); }
ssize_t preadv64v2(int fd, parts_t v, int c, off64_t at, int f) { READ(preadv64v2, fd, v, c, at, f); }

ssize_t write(int fd, const void *from, size_t n) { WRITE(write, -1, fd, from, n); }
ssize_t pwrite(int fd, const void *from, size_t n, off_t at) { WRITE(pwrite, at, fd, from, n, at); }
ssize_t pwrite64(int fd, const void *from, size_t n, off64_t at) { WRITE(pwrite64, at, fd, from, n, at); }
ssize_t writev(int fd, parts_t v, int c) { WRITEV(writev, -1, fd, v, c); }
ssize_t pwritev(int fd, parts_t v, int c, off_t at) { WRITEV(pwritev, at, fd, v, c, at); }
ssize_t pwritev64(int fd, parts_t v, int c, off64_t at) { WRITEV(pwritev64, at, fd, v, c, at); }
ssize_t pwritev2(int fd, parts_t v, int c, off_t at, int f) { WRITEV(pwritev2, at, fd, v, c, at, f); }
ssize_t pwritev64v2(int fd, parts_t v, int c, off64_t at, int f) { WRITEV(pwritev64v2, at, fd, v, c, at, f); }

/* NumPy's tofile, whose writes stay within libc. */
size_t fwrite(const void *from, size_t size, size_t n, FILE *file) {
    REAL(fwrite);
    int fd = is_ours(fileno(file)) ? fileno(file) : -1;
    ssize_t did;
    if (fd < 0 || fflush(file)) return real(from, size, n, file);
    if (!wrote(fd, from, size * n, size * n, -1, &did)) return real(from, size, n, file);
    return did < 0 ? 0 : (size_t)did / size;
}
