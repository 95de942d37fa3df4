/* A library that is preloaded into the processes of a run. It replaces write, fsync and the clock
 * functions, so that a test can make the disk and the wall clock fail. Environment variables:
 *
 * FAULT_PAGE=FILE   The file holds three little-endian numbers. It is mapped into memory and read at
 *                   every call: the state of the disk (int32: 0 works, 1 slow, 2 full, 3 read-only,
 *                   4 hangs at fsync), the duration of a slow write or fsync in milliseconds (int32),
 *                   and the nanoseconds by which the wall clock is ahead (int64).
 * FAULT_ROOT=DIR    Files below this directory are on the failing disk. Files of the ledger
 *                   (DIR/.../ledger/...) are not, because the ledger must survive every fault.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { WORKS, SLOW, FULL, READ_ONLY, HANGS };
static volatile struct { int32_t disk, milliseconds; int64_t ahead_ns; } *page;

__attribute__((constructor)) static void map_page(void) {
    const char *name = getenv("FAULT_PAGE");
    int fd = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof *page, PROT_READ, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) page = mapped;
    close(fd);
}

static int on_the_disk(int fd) {
    const char *root = getenv("FAULT_ROOT");
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = root ? readlink(link, path, sizeof path - 1) : -1;
    if (length < 0) return 0;
    path[length] = 0;
    return !strncmp(path, root, strlen(root)) && !strstr(path, "/ledger/");
}

/* Wait if the disk is slow or hangs; return 0, or the errno with which the call must fail. */
static int fault_of(int fd, int sync) {
    int kept = errno;
    if (!page || page->disk == WORKS || !on_the_disk(fd)) return errno = kept, 0;
    int disk = page->disk;
    if (disk == SLOW) usleep(1000 * page->milliseconds);
    while (sync && disk == HANGS && page->disk == HANGS) usleep(10000);
    errno = kept;
    if (sync || disk == SLOW || disk == HANGS) return 0;
    return disk == FULL ? ENOSPC : disk == READ_ONLY ? EROFS : 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAILS(fd, sync) \
    do { int error = fault_of(fd, sync); if (error) return errno = error, -1; } while (0)

int fsync(int fd) { FAILS(fd, 1); return REAL(fsync)(fd); }
int fdatasync(int fd) { FAILS(fd, 1); return REAL(fdatasync)(fd); }
ssize_t write(int fd, const void *data, size_t count) { FAILS(fd, 0); return REAL(write)(fd, data, count); }
ssize_t pwrite(int fd, const void *data, size_t count, off_t at) { FAILS(fd, 0); return REAL(pwrite)(fd, data, count, at); }
ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) { FAILS(fd, 0); return REAL(pwrite64)(fd, data, count, at); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = REAL(clock_gettime)(clock, now);
    if (result || clock != CLOCK_REALTIME || !page) return result;
    int64_t total = now->tv_nsec + page->ahead_ns;
    now->tv_sec += total / 1000000000;
    now->tv_nsec = total % 1000000000;
    if (now->tv_nsec < 0) now->tv_nsec += 1000000000, now->tv_sec--;
    return 0;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (result) *result = exact.tv_sec;
    return exact.tv_sec;
}
