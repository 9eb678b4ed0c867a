/* Stands in for the CUDA runtime where there is no GPU: kernels load, and a launch is written down instead of run. */
#include <stddef.h>
#include <string.h>

typedef struct { unsigned x, y, z; } Dim3;
typedef struct { int id, padding; unsigned value[16]; } Attribute;
typedef struct { Dim3 grid, block; size_t shared_bytes; void* stream; Attribute* attributes; unsigned num_attributes; } Launch;

enum { CLUSTER = 4, EARLY = 6 };                            /* cudaLaunchAttributeID */
unsigned fake_counts[2];                                    /* libraries loaded, kernels launched */
unsigned fake_launch[5];                                    /* of the last launch: blocks, threads, shared bytes, cluster, early */
int fake_clusters = 15, fake_status;                        /* answer and status of the occupancy call */
unsigned fake_asked[4];                                     /* of the occupancy call: as fake_launch, without early */

static void note(const Launch* launch, unsigned* to) {
  to[0] = launch->grid.x * launch->grid.y * launch->grid.z, to[1] = launch->block.x, to[2] = launch->shared_bytes;
  to[3] = 1;
  for (unsigned i = 0; i < launch->num_attributes; ++i)
    if (launch->attributes[i].id == CLUSTER) to[3] = launch->attributes[i].value[0];
}

static int ok(void) { return 0; }
static int attribute_of_kernel(int* value) { *value = 0; return 0; }
static int device_of(int* device, int ordinal) { *device = ordinal; return 0; }

int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long flags, int* found) {
  if (!strcmp(name, "cuKernelGetAttribute")) *function = (void*)attribute_of_kernel;
  else if (!strcmp(name, "cuDeviceGet")) *function = (void*)device_of;
  else *function = (void*)ok;
  if (found) *found = 0;
  return 0;
}
int cudaGetDevice(int* device) { *device = 0; return 0; }
int cudaGetDeviceCount(int* count) { *count = 1; return 0; }
int cudaDeviceGetAttribute(int* value, int attribute, int device) { *value = attribute == 97 ? 232448 : 0; return 0; }
int cudaLibraryLoadData(void** library) { *library = fake_counts, ++fake_counts[0]; return 0; }
int cudaLibraryUnload(void* library) { return 0; }
int cudaLibraryGetKernel(void** kernel, void* library, const char* name) { *kernel = fake_launch; return 0; }
int cudaKernelSetAttributeForDevice(void* kernel, int attribute, int value, int device) { return 0; }
int cudaGetLastError(void) { return 0; }
const char* cudaGetErrorString(int status) { return "as the test asked"; }
int cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel, const Launch* launch) {
  note(launch, fake_asked);
  *clusters = fake_clusters;
  return fake_status;
}
int cudaLaunchKernelExC(const Launch* launch, const void* kernel, void** arguments) {
  ++fake_counts[1];
  note(launch, fake_launch);
  fake_launch[4] = 0;
  for (unsigned i = 0; i < launch->num_attributes; ++i)
    if (launch->attributes[i].id == EARLY) fake_launch[4] = launch->attributes[i].value[0];
  return 0;
}
