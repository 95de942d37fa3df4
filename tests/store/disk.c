/* A library to preload into a process under test. For files below DISK_ROOT it keeps a copy of what
 * would survive a power loss, or makes the file system lack an ability.
 *
 * DISK_KEEP=DIR     At every fsync of a file, its content is copied to DIR, under the file's path
 *                   below DISK_ROOT. At every fsync of a directory, files that were renamed or
 *                   removed in it so far are renamed or removed in DIR. So DIR holds what is
 *                   certain to survive a power loss. If the process ends while a copy is being
 *                   made, the previous copy remains whole.
 * DISK_NO_FLOCK=1   flock fails with ENOSYS, as on Lustre mounted without -o flock.
 * DISK_NO_SHM=1     Files *-shm cannot be mapped for sharing, as on file systems on which SQLite's
 *                   write-ahead log cannot work.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Returns the path of `fd` relative to DISK_ROOT ("" for DISK_ROOT itself), or NULL if `fd` is not
 * below DISK_ROOT. */
static const char *below_root(int fd, char path[PATH_MAX]) {
    const char *root = getenv("DISK_ROOT");
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = root ? readlink(link, path, PATH_MAX - 1) : -1;
    if (length < 0) return NULL;
    path[length] = 0;
    size_t prefix = strlen(root);
    if (strncmp(path, root, prefix) || (path[prefix] != '/' && path[prefix])) return NULL;
    return path[prefix] ? path + prefix + 1 : path + prefix;
}

/* The copies made so far, and the inode of the file that each is a copy of. */
static struct {
    ino_t inode;
    char copy[2 * PATH_MAX];
} kept[64];
static int kept_count;

static void note(ino_t inode, const char *copy) {
    int place = 0;
    for (int i = 0; i < kept_count; i++)
        if (kept[i].inode == inode) kept[i].inode = 0; /* File renamed, or inode reused. */
    while (place < kept_count && strcmp(kept[place].copy, copy)) place++;
    if (place == kept_count && kept_count++ == sizeof kept / sizeof *kept) abort();
    kept[place].inode = inode;
    strcpy(kept[place].copy, copy);
}

/* Renames and removes files in the directory `copy` as they were in the directory `path` so far. */
static void keep_names(const char *path, const char *copy) {
    char name[3 * PATH_MAX], real[2 * PATH_MAX];
    struct stat status;
    struct dirent *entry;
    DIR *now = opendir(path), *then = opendir(copy);
    while (now && (entry = readdir(now))) {
        snprintf(real, sizeof real, "%s/%s", path, entry->d_name);
        snprintf(name, sizeof name, "%s/%s", copy, entry->d_name);
        for (int i = 0; i < kept_count && !stat(real, &status); i++)
            if (kept[i].inode == status.st_ino && strcmp(kept[i].copy, name)
                && !rename(kept[i].copy, name))
                strcpy(kept[i].copy, name);
    }
    while (then && (entry = readdir(then))) {
        snprintf(real, sizeof real, "%s/%s", path, entry->d_name);
        snprintf(name, sizeof name, "%s/%s", copy, entry->d_name);
        if (access(real, F_OK)) unlink(name);
    }
    if (now) closedir(now);
    if (then) closedir(then);
}

static void keep_content(int fd) {
    const char *target = getenv("DISK_KEEP");
    char path[PATH_MAX], copy[2 * PATH_MAX], part[3 * PATH_MAX], block[1 << 16];
    struct stat status;
    const char *name = target ? below_root(fd, path) : NULL;
    if (!name || fstat(fd, &status)) return;
    snprintf(copy, sizeof copy, "%s/%s", target, name);
    if (S_ISDIR(status.st_mode)) {
        keep_names(path, copy);
        return;
    }
    for (char *slash = copy + strlen(target) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(copy, 0777);
        *slash = '/';
    }
    /* Read from the descriptor itself if that is readable: closing a second descriptor of the same
     * file would release the process's locks on the file. */
    int readable = (fcntl(fd, F_GETFL) & O_ACCMODE) != O_WRONLY;
    int from = readable ? fd : open(path, O_RDONLY);
    snprintf(part, sizeof part, "%s.part", target);
    int to = open(part, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    off_t at = 0;
    ssize_t count = 0;
    while (from >= 0 && to >= 0 && (count = pread(from, block, sizeof block, at)) > 0) {
        if (write(to, block, count) != count) abort();
        at += count;
    }
    if (from < 0 || to < 0 || count < 0) abort();
    if (!readable) close(from);
    close(to);
    if (rename(part, copy)) abort();
    note(status.st_ino, copy);
}

/* Makes the copy for one fsync; a mutex is needed because several threads call fsync. */
static void keep(int fd) {
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    int error = errno;
    pthread_mutex_lock(&one);
    keep_content(fd);
    pthread_mutex_unlock(&one);
    errno = error;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int fsync(int fd) {
    int result = REAL(fsync)(fd);
    if (!result) keep(fd);
    return result;
}

int fdatasync(int fd) {
    int result = REAL(fdatasync)(fd);
    if (!result) keep(fd);
    return result;
}

int flock(int fd, int operation) {
    char path[PATH_MAX];
    if (getenv("DISK_NO_FLOCK") && below_root(fd, path)) {
        errno = ENOSYS;
        return -1;
    }
    return REAL(flock)(fd, operation);
}

static int refused(int fd, int flags) {
    char path[PATH_MAX];
    const char *name = (flags & MAP_SHARED) && getenv("DISK_NO_SHM") ? below_root(fd, path) : NULL;
    return name && strlen(name) > 4 && !strcmp(name + strlen(name) - 4, "-shm");
}

void *mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset) {
    if (fd >= 0 && refused(fd, flags)) {
        errno = ENODEV;
        return MAP_FAILED;
    }
    return REAL(mmap)(at, length, protection, flags, fd, offset);
}

void *mmap64(void *at, size_t length, int protection, int flags, int fd, off64_t offset) {
    if (fd >= 0 && refused(fd, flags)) {
        errno = ENODEV;
        return MAP_FAILED;
    }
    return REAL(mmap64)(at, length, protection, flags, fd, offset);
}
